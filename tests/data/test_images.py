"""Files become RGB images, or are named with a reason."""

import io
import os

import numpy as np
import pytest
from PIL import ExifTags, Image

from quickvit.data import Unreadable, find_images, read_image


def ramp(dtype, scale):
    return (np.arange(16, dtype=np.float64).reshape(4, 4) / 15 * scale).astype(dtype)


def saved(image, tmp_path, name):
    path = tmp_path / name
    image.save(path)
    return path


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path):
    path = saved(Image.fromarray(ramp(np.uint16, 65535)), tmp_path, "deep.png")
    pixels = np.asarray(read_image(path))
    np.testing.assert_allclose(pixels[..., 0], ramp(np.float64, 255), atol=1)
    assert (pixels[..., 0] == pixels[..., 2]).all()
    path = saved(Image.fromarray(ramp(np.int32, 65535)), tmp_path, "deep.tif")
    np.testing.assert_array_equal(np.asarray(read_image(path)), pixels)


def test_transparency_is_laid_on_white(tmp_path):
    layer = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    layer.putpixel((0, 0), (255, 0, 0, 255))
    for name, image in {"a.png": layer, "p.png": layer.quantize(4)}.items():
        pixels = np.asarray(read_image(saved(image, tmp_path, name)))
        assert pixels[0, 0].tolist() == [255, 0, 0], name
        assert (pixels[1:] == 255).all(), name
    grey = Image.new("LA", (2, 2), (0, 0))
    assert (np.asarray(read_image(saved(grey, tmp_path, "la.png"))) == 255).all()


@pytest.mark.parametrize(
    ("name", "size"), [("x.jpg", (8, 4)), ("x.png", (8, 4)), ("x.webp", (8, 4)), ("x.tif", (4, 8))]
)
def test_only_tiff_files_are_turned_as_they_say(tmp_path, name, size):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / name, exif=exif)
    assert read_image(tmp_path / name).size == size


@pytest.mark.parametrize(
    ("mode", "name"),
    [("RGB", "x.png"), ("L", "x.png"), ("1", "x.png"), ("P", "x.gif"), ("CMYK", "x.jpg"), ("CMYK", "x.tif")],
)
def test_every_mode_becomes_rgb_of_the_right_colour(mode, name, tmp_path):
    image = Image.new("RGB", (8, 8), "white" if mode in "L1" else (0, 0, 255)).convert(mode)
    read = read_image(saved(image, tmp_path, name))
    assert (read.mode, read.size) == ("RGB", (8, 8))
    expected = (255, 255, 255) if mode in "L1" else (0, 0, 255)
    np.testing.assert_allclose(np.asarray(read), np.broadcast_to(expected, (8, 8, 3)), atol=4)


def test_what_cannot_be_read_is_named_with_a_reason(tmp_path, huge_png):
    whole = saved(Image.effect_noise((64, 64), 50), tmp_path, "whole.png").read_bytes()
    files = {
        "empty.png": (b"", "UnidentifiedImageError"),
        "cut.png": (whole[: len(whole) // 2], "OSError"),
        "text.png": (b"no image at all", "UnidentifiedImageError"),
        "huge.png": (huge_png(), "DecompressionBombError"),
        # Pillow would only warn of this one.
        "large.png": (huge_png(10_000, 10_000), "DecompressionBombWarning"),
    }
    for name, (content, reason) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Unreadable) as caught:
            read_image(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
        assert reason in caught.value.reason
        assert "\n" not in caught.value.reason
        assert str(caught.value) == f"{caught.value.path}: {caught.value.reason}"
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(Unreadable, match=r"float\.tif: ValueError: mode F has no fixed range"):
        read_image(tmp_path / "float.tif")
    Image.fromarray(np.full((4, 4), 2**20, np.int32)).save(tmp_path / "wide.tif")
    with pytest.raises(Unreadable, match="not 16 bits"):
        read_image(tmp_path / "wide.tif")


def within_iptc(content):
    """A file of IPTC with a content that Pillow finds out by itself."""
    fields = [(3, 60, b"\1\0"), (3, 20, b"\0\4"), (3, 30, b"\0\4"), (3, 120, b"\5"), (8, 10, content)]
    return b"".join(b"\x1c" + bytes([*tag]) + len(data).to_bytes(2, "big") + data for *tag, data in fields)


@pytest.mark.parametrize("wrap", [bytes, within_iptc])
def test_programs_are_no_images(tmp_path, monkeypatch, wrap):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("ran a program"))
    Image.new("RGB", (4, 4)).save(tmp_path / "x.eps")
    (tmp_path / "x.png").write_bytes(wrap((tmp_path / "x.eps").read_bytes()))
    with pytest.raises(Unreadable, match="UnidentifiedImageError"):
        read_image(tmp_path / "x.png")


def test_what_cannot_be_an_image_here_is_not_found(tmp_path):
    for suffix in ("eps", "iim", "bufr", "grib", "h5", "mpg", "wmf"):
        (tmp_path / f"x.{suffix}").touch()
    assert find_images([tmp_path]) == []


@pytest.mark.parametrize("suffix", ["avif", "bmp", "gif", "jpg", "jp2", "png", "tif", "webp", "ico", "tga"])
def test_damage_anywhere_is_unreadable_or_harmless(suffix):
    generator = np.random.default_rng(0)
    whole = io.BytesIO()
    noise = generator.integers(0, 256, (24, 30, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    try:
        image.save(whole, Image.registered_extensions()[f".{suffix}"])
    except (KeyError, OSError):
        pytest.skip(f"this Pillow cannot write {suffix}")
    outcomes = set()
    for _ in range(60):
        data = np.frombuffer(whole.getvalue(), np.uint8).copy()
        places = generator.integers(
            0, min(len(data), generator.choice([60, 10**6])), generator.integers(1, 20)
        )
        data[places] = generator.integers(0, 256, len(places))
        end = len(data) if generator.random() < 0.7 else generator.integers(len(data))
        try:
            outcomes.add(read_image(io.BytesIO(data[:end].tobytes()), "damaged").mode)
        except Unreadable as error:
            outcomes.add(error.path)
    assert outcomes <= {"RGB", "damaged"}
    assert "damaged" in outcomes


def test_an_open_file_is_named_as_told():
    with pytest.raises(Unreadable, match=r"^shard 3: "):
        read_image(io.BytesIO(b""), "shard 3")


def test_folders_are_searched_in_order_without_hidden_files_and_circles(tmp_path):
    for name in ("b/2.png", "b/10.JPG", "a.png", "a/z.webp", ".hidden/x.png", "b/._2.png", "b/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    os.symlink(tmp_path, tmp_path / "b" / "circle")
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "a", tmp_path / "elsewhere" / "linked")
    found = [str(path.relative_to(tmp_path)) for path in find_images([tmp_path])]
    assert found == ["a/z.webp", "a.png", "b/10.JPG", "b/2.png", "elsewhere/linked/z.webp"]


def test_a_link_to_itself_is_no_folder(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "0.png")
    (tmp_path / "loop").symlink_to("loop")
    assert find_images([tmp_path]) == [tmp_path / "0.png"]
