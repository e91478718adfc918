(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () => getComputedStyle(root).colorScheme === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const show = () => { button.textContent = dark() ? "☀ light" : "☾ dark"; };
  // A page that is opened as a file may have no storage.
  const remember = (action) => { try { return action(localStorage); } catch { return null; } };

  const kept = remember((storage) => storage.getItem("quickvit-theme"));
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  show();
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember((storage) => storage.setItem("quickvit-theme", root.dataset.theme));
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);

  // A link to a table opens it.
  const open = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) { target.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", open);
  open();
})();
