"""Pictures of an HTML page in Debian's Chromium: light, dark, and as wide as a phone.

    python benchmarks/screenshot.py explorer.html docs/explorer --image 3 --press rm

writes docs/explorer-light.png, -dark.png and -phone.png. In an explorer it first chooses an image and
presses keys.
"""

from __future__ import annotations

import argparse
import base64
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from browser import open_browser

VIEWS = {"light": (1100, "light"), "dark": (1100, "dark"), "phone": (375, "light")}


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("prefix")
    parser.add_argument("--image", type=int, help="the number of the image")
    parser.add_argument("--press", default="", help="keys to press")
    arguments = parser.parse_args()
    with open_browser() as browser:
        for name, (width, scheme) in VIEWS.items():
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_feature]})
            browser.get(arguments.page.resolve().as_uri())
            if arguments.image is not None:
                choices = browser.find_elements("css selector", "#explorer .images input")
                browser.execute_script("arguments[0].click()", choices[arguments.image])
            if arguments.press:
                browser.find_element("css selector", "#explorer button").send_keys(arguments.press)
            browser.execute_script("document.activeElement.blur()")
            options = {"captureBeyondViewport": True, "optimizeForSpeed": False}
            picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", **options})
            path = Path(f"{arguments.prefix}-{name}.png")
            # A palette is enough for a page, and makes a small file.
            image = Image.open(BytesIO(base64.b64decode(picture["data"]))).convert("RGB")
            image.quantize(256, kmeans=1, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
