// Data: see explorer.py. A pose is a number, its place in data.poses; pose 0 is upright.
(() => {
  "use strict";
  const root = document.getElementById("explorer");
  const find = (selector) => root.querySelector(selector);
  const data = JSON.parse(find('script[type="application/json"]').textContent);
  const size = data.grid * data.grid;
  const KINDS = ["upright", "moved", "computed", "difference"];
  const state = { image: 0, pose: 0, angle: 0 };

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    Object.assign(element, properties);
    element.append(...children);
    return element;
  }

  const percent = (p) => `${Math.round(100 * p)} %`;
  const says = (image, model, pose) => image.classes[image.labels[model][pose]];

  // ------------------------------------------------------------------ the representation

  /** Values of an n × n map after a pose: turned anti-clockwise, then perhaps mirrored, as the image is. */
  function moved(values, { turns, mirror }) {
    const n = data.grid;
    for (let turn = 0; turn < turns; turn++) {
      const before = values;
      values = before.map((_, i) => before[(i % n) * n + (n - 1 - Math.floor(i / n))]);
    }
    return mirror ? values.map((_, i) => values[Math.floor(i / n) * n + (n - 1 - (i % n))]) : values;
  }

  /** ρ(g) on the maps of one copy of an irrep: each moved, then mixed by the irrep's matrix. */
  function transformed(maps, irrep, pose) {
    const movedMaps = maps.map((values) => moved(values, data.poses[pose]));
    return data.irreps[irrep].matrices[pose].map((row) =>
      movedMaps[0].map((_, i) => row.reduce((sum, entry, j) => sum + entry * movedMaps[j][i], 0)));
  }

  /** The maps of a copy that the model computed in a pose, in parts of the copy's largest value. */
  function computed(image, copy, pose) {
    const count = data.copies[copy].channels.length;
    image.decoded ??= image.features.map((text) =>
      new Int16Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer));
    return Array.from({ length: count }, (_, component) => {
      const start = (pose * count + component) * size;
      return Float32Array.from(image.decoded[copy].subarray(start, start + size), (v) => v / data.steps);
    });
  }

  // ------------------------------------------------------------------ what stays on the page

  function choice(group, value, label, image, ...more) {
    const input = make("input", { type: "radio", name: `explorer-${group}`, value, ariaLabel: label });
    const picture = make("span", { className: "picture" }, image);
    return make("label", { className: "choice" }, input, picture, ...more);
  }

  data.images.forEach((image, number) => {
    const picture = make("img", { src: image.source, alt: "" });
    const name = image.truth || `image ${number + 1}`;
    const label = choice("image", number, name, picture, make("span", { className: "name" }, name));
    label.firstChild.addEventListener("change", () => show({ image: number }));
    find(".images").append(label);
  });

  const poses = data.poses.map((pose, number) => {
    const picture = make("img", { alt: "" });
    picture.style.transform = transform(pose, -90 * pose.turns);
    const marks = make("span", { className: "marks" }, ...data.models.map(() => make("i")));
    const label = choice("pose", number, "", picture, make("span", { className: "name" }, pose.symbol), marks);
    label.firstChild.addEventListener("change", () => show({ pose: number }));
    find(".poses").append(label);
    return { picture, input: label.firstChild, marks: [...marks.children] };
  });

  const answers = data.models.map((name) => {
    const parts = {
      says: make("p", { className: "says" }),
      constancy: make("p", { className: "constancy" }),
      bars: make("ul", { className: "bars" }),
    };
    const heading = make("h4", {}, name);
    find(".answers").append(make("section", { className: "answer" }, heading, ...Object.values(parts)));
    return parts;
  });

  const cards = {};
  for (const [name, irrep] of Object.entries(data.irreps)) {
    const matrix = make("span", { className: "matrix" });
    const columns = ["", ...KINDS];
    const maps = make("div", { className: "maps" }, ...columns.map((kind) => make("span", {}, kind)));
    const meaning = make("p", { className: "meaning" }, irrep.meaning);
    const head = make("div", { className: "head" }, make("h4", {}, name), meaning, matrix);
    find(".features").append(make("article", { className: "irrep" }, head, maps));
    cards[name] = { matrix, maps };
  }

  const rows = data.copies.map(({ irrep, channels }) => channels.map((channel) => {
    const canvases = KINDS.map((kind) => {
      const canvas = make("canvas", { width: data.grid, height: data.grid, role: "img" });
      canvas.ariaLabel = `channel ${channel} of ${irrep}, ${kind}`;
      return canvas;
    });
    cards[irrep].maps.append(make("span", { title: `channel ${channel}` }, String(channel)), ...canvases);
    return canvases;
  }));

  // The first pair of E once more, as arrows on the image that they turn with.
  const firstPair = data.copies.findIndex(({ channels }) => channels.length === 2);
  const [arrowImage, arrows] = (() => {
    const picture = make("img", { alt: "" });
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.setAttribute("viewBox", `0 0 ${data.grid} ${data.grid}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "the pair of E as an arrow on each patch");
    svg.append(path);
    const words = "the same pair as an arrow on each patch: it turns with the image";
    const head = make("div", { className: "head" }, make("h4", {}, "E"), make("p", { className: "meaning" }, words));
    const field = make("div", { className: "arrows" }, picture, svg);
    find(".features").append(make("article", { className: "irrep" }, head, field));
    return [picture, path];
  })();

  // ------------------------------------------------------------------ what changes

  const style = getComputedStyle(root);
  const colours = ["--cool", "--warm"].map((name) => style.getPropertyValue(name).split(",").map(Number));

  /** Paint values from −1 to 1: the sign is the hue, the size the opacity, so that any background will do. */
  function paint(canvas, values) {
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(data.grid, data.grid);
    values.forEach((value, i) => {
      // Less than proportional, so that small values are seen too.
      pixels.data.set([...colours[+(value > 0)], 255 * Math.abs(value) ** 0.7], 4 * i);
    });
    context.putImageData(pixels, 0, 0);
  }

  /** Arrows (x to the right, y upwards) on the patches, as the path of an SVG. */
  function arrowPath(x, y) {
    const longest = Math.max(...x.map((_, i) => Math.hypot(x[i], y[i]))) || 1;
    const point = (u, v) => `${u.toFixed(3)} ${v.toFixed(3)}`;
    return Array.from(x, (_, i) => {
      const [dx, dy] = [x[i] / longest, -y[i] / longest];
      const [u, v] = [(i % data.grid) + 0.5 + dx / 2, Math.floor(i / data.grid) + 0.5 + dy / 2];
      const barb = (side) => point(u - 0.35 * dx - 0.2 * side * dy, v - 0.35 * dy + 0.2 * side * dx);
      return `M${point(u - dx, v - dy)}L${point(u, v)}M${barb(1)}L${point(u, v)}L${barb(-1)}`;
    }).join("");
  }

  function transform({ mirror }, angle) {
    return `scaleX(${mirror ? -1 : 1}) rotate(${angle}deg)`;
  }

  function showImage(image, pose) {
    const picture = find(".frame img");
    // The nearest way round: from three quarter turns to four, not back to none.
    const target = -90 * pose.turns;
    state.angle = target + 360 * Math.round((state.angle - target) / 360);
    if (picture.src !== image.source) {
      for (const copy of [picture, arrowImage, ...poses.map((pose) => pose.picture)]) copy.src = image.source;
    }
    picture.alt = `${image.truth || "the image"}, ${pose.words}`;
    picture.style.transform = arrowImage.style.transform = transform(pose, state.angle);
    picture.onload = () => picture.classList.toggle("smooth", picture.naturalWidth > 80);
    find(".pose").replaceChildren(make("b", {}, pose.symbol), pose.words);
  }

  function showPoses(image) {
    poses.forEach(({ input, marks }, pose) => {
      input.checked = pose === state.pose;
      const words = data.models.map((name, model) => `${name} says ${says(image, model, pose)}`);
      input.ariaLabel = `${data.poses[pose].words}: ${words.join(", ")}`;
      marks.forEach((mark, model) => {
        mark.className = says(image, model, pose) === says(image, model, 0) ? "same" : "";
        mark.title = words[model];
      });
    });
  }

  function showAnswers(image) {
    answers.forEach((parts, model) => {
      const now = image.answers[model][state.pose], upright = image.answers[model][0];
      const label = image.labels[model][state.pose];
      const different = new Set(image.labels[model]).size;
      parts.says.textContent = `${image.classes[label]}, ${percent(now[label])}`;
      const right = image.truth && (image.classes[label] === image.truth ? "right, " : "wrong, ");
      const poses = different === 1 ? "one answer in all eight poses" : `${different} answers in eight poses`;
      parts.constancy.textContent = right + poses;
      if (parts.image !== image) {
        parts.image = image;
        parts.bars.replaceChildren(...image.classes.map((name) => make("li", {},
          make("span", { className: "name", title: name }, name),
          make("span", { className: "track" },
            make("span", { className: "bar" }), make("span", { className: "upright" })),
          make("span", { className: "percent" }))));
      }
      [...parts.bars.children].forEach((item, i) => {
        item.className = i === label ? "best" : "";
        item.querySelector(".bar").style.width = `${100 * now[i]}%`;
        item.querySelector(".upright").style.left = `calc(${100 * upright[i]}% - 1px)`;
        item.querySelector(".percent").textContent = percent(now[i]);
      });
    });
  }

  function showFeatures(image) {
    let worst = 0;
    data.copies.forEach(({ irrep }, copy) => {
      const upright = computed(image, copy, 0);
      const predicted = transformed(upright, irrep, state.pose);
      const actual = computed(image, copy, state.pose);
      rows[copy].forEach((canvases, component) => {
        const difference = predicted[component].map((value, i) => value - actual[component][i]);
        worst = Math.max(worst, ...difference.map(Math.abs));
        const shown = [upright[component], predicted[component], actual[component], difference];
        shown.forEach((values, i) => paint(canvases[i], values));
      });
      if (copy === firstPair) arrows.setAttribute("d", arrowPath(...actual));
    });
    for (const [name, { matrix }] of Object.entries(cards)) {
      matrix.innerHTML = matrixMarkup(data.irreps[name].matrices[state.pose]);
    }
    const rounding = worst < 4 / data.steps;
    const words = rounding ? "no more than rounding" : "more than rounding: these features do not follow the image";
    find(".difference").replaceChildren(
      "Largest difference: ", make("b", {}, worst.toFixed(5)), ` of the largest value, ${words}.`);
  }

  /** A matrix of whole numbers in MathML. */
  function matrixMarkup(rows) {
    const number = (v) => (v < 0 ? `<mrow><mo form="prefix">−</mo><mn>${-v}</mn></mrow>` : `<mn>${v + 0}</mn>`);
    const table = rows.map((row) => `<mtr>${row.map((v) => `<mtd>${number(v)}</mtd>`).join("")}</mtr>`).join("");
    const body = rows.length > 1 ? `<mo>(</mo><mtable>${table}</mtable><mo>)</mo>` : number(rows[0][0]);
    return `<math><mrow><mi>ρ</mi><mo>(</mo><mi>g</mi><mo>)</mo><mo>=</mo>${body}</mrow></math>`;
  }

  function show(change) {
    Object.assign(state, change);
    const image = data.images[state.image];
    showImage(image, data.poses[state.pose]);
    showPoses(image);
    showAnswers(image);
    showFeatures(image);
  }

  const act = (what) => show({ pose: what === "e" ? 0 : data.then[what][state.pose] });
  for (const button of root.querySelectorAll("button")) {
    button.addEventListener("click", () => act(button.dataset.do));
  }
  root.addEventListener("keydown", (event) => {
    const what = { r: "r", m: "s", u: "e" }[event.key.toLowerCase()];
    if (!what || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(what);
  });
  find(".images input").checked = true;
  show({});
})();
