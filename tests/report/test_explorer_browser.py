"""The explorer in a real browser."""

import io

import browser
import numpy as np
import pytest
from PIL import Image

from quickvit.group import act_on_image
from quickvit.report.exploration import POSES, act_on_copy, symbol
from quickvit.report.explorer import explorer_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
]
KEYS = {"r": "r", "s": "m", "e": "u"}
CANVASES = """
return [...document.querySelectorAll("#explorer canvas")].map((canvas) =>
  [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data]);
"""


class Page:
    """What a user sees and does."""

    def __init__(self, driver):
        self.driver = driver

    def find(self, selector):
        return self.driver.find_elements("css selector", f"#explorer {selector}")

    def texts(self, selector):
        return [element.text for element in self.find(selector)]

    def choose(self, group, number):
        self.driver.execute_script("arguments[0].click()", self.find(f".{group} input")[number])

    @property
    def pose(self):
        return self.find(".pose b")[0].text

    @property
    def picture(self):
        """The large image, as it is on the screen, at its own size."""
        shown = Image.open(io.BytesIO(self.find(".frame")[0].screenshot_as_png)).convert("RGB")
        return np.asarray(shown.resize((32, 32), Image.Resampling.BOX), dtype=float)

    @property
    def maps(self):
        """The maps of all rows, [row, upright or moved or computed or difference, H, W], as signed opacities."""
        pixels = np.array(self.driver.execute_script(CANVASES), dtype=float).reshape(-1, 4, 4, 4, 4)
        sign = np.where(pixels[..., 0] > pixels[..., 2], 1, -1)
        return sign * pixels[..., 3]


@pytest.fixture(scope="module")
def driver():
    with browser.open_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def file(exploration, tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(explorer_page(exploration), encoding="utf-8")
    return path


@pytest.fixture
def page(driver, file):
    """The page as it opens; nothing that a test does to it may leave an error on the console."""
    driver.get(file.as_uri())
    yield Page(driver)
    # Chromium warns of the slowness of reading canvases, which only the tests do.
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def opacities(maps, largest):
    return np.sign(maps) * 255 * np.abs(maps / largest) ** 0.7


def poses_of(exploration, image):
    return [act_on_image(exploration.images[image], g).permute(1, 2, 0).numpy() for g in POSES]


@pytest.mark.parametrize("image", [0, 1])
def test_all_poses(page, exploration, image):
    ours, theirs = exploration.answers
    expected_pictures = poses_of(exploration, image)
    page.choose("images", image)
    for pose, g in enumerate(POSES):
        page.choose("poses", pose)
        assert page.pose == symbol(g)

        shown = page.picture
        errors = [np.abs(shown - picture).mean() for picture in expected_pictures]
        assert int(np.argmin(errors)) == pose
        assert errors[pose] < 8 < min(errors[:pose] + errors[pose + 1 :]) / 3

        maps, row = page.maps, 0
        for copy, features in zip(exploration.copies, exploration.features, strict=True):
            largest = features[image].abs().max().item()
            moved = act_on_copy(features[image, 0], copy.irrep, g).numpy()
            for component in range(len(copy.channels)):
                upright, found, computed, difference = maps[row]
                stored = features[image, :, component].numpy()
                np.testing.assert_allclose(upright, opacities(stored[0], largest), atol=2)
                np.testing.assert_allclose(found, opacities(moved[component], largest), atol=2)
                np.testing.assert_allclose(computed, opacities(stored[pose], largest), atol=2)
                assert np.abs(difference).max() < 2
                row += 1
        assert row == len(maps)
        assert float(page.texts(".difference b")[0]) < 1e-4

        says = [
            f"{exploration.classes[int(answers.labels[image, pose])]}, "
            f"{100 * answers.probabilities[image, pose].max().item():.0f} %"
            for answers in (ours, theirs)
        ]
        assert page.texts(".says") == says
        for answers, words in zip((ours, theirs), page.texts(".constancy"), strict=True):
            assert words.startswith("right" if answers.labels[image, pose] == image else "wrong")
            different = len(set(answers.labels[image].tolist()))
            assert words.endswith(
                "one answer in all eight poses" if different == 1 else f"{different} answers in eight poses"
            )
        marks = [mark.get_attribute("class") == "same" for mark in page.find(".poses .marks i")]
        assert marks[::2] == [True] * 8
        assert marks[1::2] == (theirs.labels[image] == theirs.labels[image, 0]).tolist()


@pytest.mark.parametrize("way", ["buttons", "keys"])
def test_turning_and_mirroring(page, exploration, way):
    expected = {
        "r": "r",
        "rr": "r²",
        "rrs": "sr²",
        "rrsr": "sr",
        "rrsrr": "s",
        "rrsrrs": "e",
        "rs": "sr",
        "rse": "e",
    }
    for word, pose in expected.items():
        page.choose("poses", 0)
        for letter in word:
            if way == "buttons":
                page.find(f'[data-do="{letter}"]')[0].click()
            else:
                page.find(".poses input")[0].send_keys(KEYS[letter])
        assert page.pose == pose
    assert page.find(".poses input")[0].is_selected()
    shown = page.picture
    errors = [np.abs(shown - picture).mean() for picture in poses_of(exploration, 0)]
    assert int(np.argmin(errors)) == 0


def test_a_model_that_does_not_follow_is_told(driver, page, file, exploration):
    wrong = explorer_page(exploration).replace('"turns":1,"mirror":0', '"turns":3,"mirror":0')
    other = file.with_name("wrong.html")
    other.write_text(wrong, encoding="utf-8")
    driver.get(other.as_uri())
    page.choose("poses", 1)
    assert float(page.texts(".difference b")[0]) > 0.1
    assert "do not follow the image" in page.texts(".difference")[0]


def test_everything_has_a_name_and_can_be_reached(page):
    for element in page.find("input, canvas, button, svg"):
        assert element.accessible_name, element.get_attribute("outerHTML")
    for element in page.find("input, button"):
        page.driver.execute_script("arguments[0].focus()", element)
        assert page.driver.switch_to.active_element == element


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(page, scheme):
    metrics = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        assert page.driver.execute_script("return document.documentElement.scrollWidth") == 375
        colour = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (int(colour[4:].split(",")[0]) > 128) == (scheme == "light")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
