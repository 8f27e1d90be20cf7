"""The fast image path equals transformers' processor, and hostile files cost nothing."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from ftserve.engine.errors import InvalidRequestError, MediaError
from ftserve.engine.types import MediaItem
from ftserve.preprocess import formats
from ftserve.preprocess.formats import ImageLimits, open_image
from ftserve.preprocess.images import PatchRules, image_item, normalize, patchify
from tests.preprocess.pictures import encoded, picture

SMALL = PatchRules()  # transformers' defaults: one million pixels
QWEN25 = PatchRules(max_pixels=12845056)  # what Qwen2.5-VL's own file says
QWEN3 = PatchRules(patch_size=16, min_pixels=65536, max_pixels=16777216, mean=(0.5,) * 3, std=(0.5,) * 3)

SIZES = [
    (28, 28),
    (1, 1),
    (3, 3),
    (1, 200),
    (200, 1),
    (500, 19),
    (57, 91),
    (640, 480),
    (1280, 960),
    (961, 1279),
    (2000, 11),
    (1920, 1080),
    (4000, 3000),
]


def item_of(data: bytes, rules: PatchRules = SMALL) -> MediaItem:
    return image_item(open_image(data, ImageLimits()), rules, b"digest")


def reference(image: Image.Image, rules: PatchRules) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Return `pixel_values` and the grid from transformers' default (torchvision) processor."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(
        size={"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
        patch_size=rules.patch_size,
        image_mean=list(rules.mean),
        image_std=list(rules.std),
    )
    out = processor(images=image, return_tensors="np")
    return out["pixel_values"], out["image_grid_thw"][0].tolist()


def assert_equal_to_reference(item: MediaItem, image: Image.Image, rules: PatchRules) -> None:
    pixel_values, grid = reference(image, rules)
    assert list(item.grid) == grid
    assert item.num_tokens == np.prod(grid) // rules.merge_size**2
    assert item.own_patches.dtype == np.uint8
    assert item.own_patches.shape == pixel_values.shape
    std = np.asarray(rules.std, np.float32)[:, None] * 255
    off = np.abs(normalize(item.own_patches, rules) - pixel_values).reshape(len(pixel_values), 3, -1) * std
    assert (off > 2).mean() < 0.005


@pytest.mark.parametrize("rules", [SMALL, QWEN25, QWEN3], ids=["defaults", "qwen2.5", "qwen3"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_equals_the_processor_at_every_size(size: tuple[int, int], rules: PatchRules) -> None:
    image = picture(*size)
    assert_equal_to_reference(item_of(encoded(image, "PNG", compress_level=1), rules), image, rules)


def test_values_of_an_upright_picture_equal_the_processors_exactly() -> None:
    image = picture(640, 480)
    assert np.allclose(normalize(item_of(encoded(image)).own_patches, SMALL), reference(image, SMALL)[0], atol=1e-5)


@cache
def mode_samples() -> dict[str, bytes]:
    """Return a file for each mode that a file can hold."""
    rgb = picture(320, 240)
    grey = rgb.convert("L")
    return {
        "1": encoded(grey.convert("1")),
        "L": encoded(grey),
        "P": encoded(rgb.convert("P", palette=Image.Palette.ADAPTIVE)),
        "RGB": encoded(rgb),
        "RGB-webp": encoded(rgb, "WEBP", lossless=True),
        "RGB-gif": encoded(rgb, "GIF"),
        "RGB-avif": encoded(rgb, "AVIF"),
        "RGB-bmp": encoded(rgb, "BMP"),
        "L-jpeg": encoded(grey, "JPEG"),
        "RGB-jpeg": encoded(rgb, "JPEG", progressive=True),
        "CMYK-jpeg": encoded(rgb.convert("CMYK"), "JPEG"),
        "CMYK": encoded(rgb.convert("CMYK"), "TIFF"),
        "YCbCr": encoded(rgb.convert("YCbCr"), "TIFF", compression="jpeg"),
        "I": encoded(grey.convert("I"), "TIFF"),
        "F": encoded(grey.convert("F"), "TIFF"),
        "I;16": encoded(Image.fromarray(np.asarray(grey).astype(np.uint16))),
    }


FILE_MODES = [
    *("1", "L", "P", "RGB", "RGB-webp", "RGB-gif", "RGB-avif", "RGB-bmp", "L-jpeg", "RGB-jpeg", "CMYK-jpeg"),
    *("CMYK", "YCbCr", "I", "F", "I;16"),
]


def test_the_list_of_modes_is_whole() -> None:
    assert list(mode_samples()) == FILE_MODES


@pytest.mark.parametrize("mode", FILE_MODES)
def test_equals_the_processor_for_files_of_every_mode(mode: str) -> None:
    data = mode_samples()[mode]
    assert_equal_to_reference(item_of(data), Image.open(io.BytesIO(data)).convert("RGB"), SMALL)


@pytest.mark.parametrize(
    "mode", ["1", "CMYK", "F", "HSV", "I", "I;16", "I;16B", "L", "LAB", "P", "RGB", "RGBX", "YCbCr"]
)
def test_equals_the_processor_in_every_mode_of_pillow(mode: str) -> None:
    image = picture(160, 120).convert("L" if mode.startswith("I;") else "RGB").convert(mode)
    assert_equal_to_reference(image_item(image.copy(), SMALL, b""), image.convert("RGB"), SMALL)


@cache
def transparent_samples() -> dict[str, bytes]:
    rgba = picture(320, 240).convert("RGBA")
    rgba.putalpha(Image.radial_gradient("L").resize(rgba.size))
    palette = picture(320, 240).convert("P", palette=Image.Palette.ADAPTIVE)
    return {
        "RGBA": encoded(rgba),
        "RGBA-webp": encoded(rgba, "WEBP", lossless=True),
        "LA": encoded(rgba.convert("LA")),
        "P-alpha": encoded(rgba.quantize(64)),
        "P": encoded(palette, transparency=int(np.bincount(np.asarray(palette).ravel()).argmax())),
        "L": encoded(picture(320, 240).convert("L"), transparency=100),
        "RGB": encoded(Image.new("RGB", (320, 240), (10, 20, 30)), transparency=(10, 20, 30)),
    }


@pytest.mark.parametrize("mode", ["RGBA", "RGBA-webp", "LA", "P-alpha", "P", "L", "RGB"])
def test_transparency_is_shown_over_white(mode: str) -> None:
    data = transparent_samples()[mode]
    layer = Image.open(io.BytesIO(data)).convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    shown = Image.alpha_composite(white, layer).convert("RGB")
    assert_equal_to_reference(item_of(data), shown, SMALL)


def test_a_transparent_colour_that_pillow_cannot_key_does_no_harm() -> None:
    data = encoded(Image.fromarray(np.full((60, 60), 300, np.uint16)), transparency=300)
    assert item_of(data).grid == (1, 4, 4)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    image = picture(300, 200)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert_equal_to_reference(item_of(data), upright, SMALL)
    assert item_of(data).grid[1:] == ((22, 14) if orientation >= 5 else (14, 22))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # as `prepare_thread` does for the process
def test_broken_exif_says_nothing() -> None:
    image = picture(300, 200)
    data = encoded(image, "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff garbage", quality=95)
    assert_equal_to_reference(item_of(data), Image.open(io.BytesIO(data)), SMALL)


def test_only_the_first_frame_of_an_animation_is_read() -> None:
    frames = [picture(100, 80, seed) for seed in range(3)]
    for form in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:], lossless=True)
        first = Image.open(io.BytesIO(data)).convert("RGB")
        assert_equal_to_reference(item_of(data), first, SMALL)


def test_frames_are_paired_in_time_and_the_last_one_is_repeated() -> None:
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (3, 56, 84), np.uint8) for _ in range(3)]
    patches = patchify(frames, SMALL).reshape(2, 2, 3, 2, 2, 3, 2, 14, 14)  # t, rows, columns, merge², c, frame, h, w
    for t, pair in enumerate([(0, 1), (2, 2)]):
        for k, number in enumerate(pair):
            back = patches[t, ..., k, :, :].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, 56, 84)
            assert np.array_equal(back, frames[number])


def png_header(width: int, height: int, depth: int = 1) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def webp_header(width: int, height: int) -> bytes:
    body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + (width - 1).to_bytes(3, "little")
    body += (height - 1).to_bytes(3, "little") + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


@cache
def too_large() -> dict[str, bytes]:
    return {
        "png-1-bit": png_header(20000, 20000),
        "png": png_header(12000, 12000, 8),
        "webp": webp_header(16383, 16383),
        "gif": b"GIF89a"
        + struct.pack("<HH", 65535, 65535)
        + b"\0\0\0,"
        + struct.pack("<HHHH", 0, 0, 65535, 65535)
        + b"\0\x08\x02ab\0;",
        "bytes": b"\xff\xd8\xff" + bytes(65 << 20),
    }


@pytest.mark.parametrize("kind", ["png-1-bit", "png", "webp", "gif", "bytes"])
def test_what_is_too_large_is_refused_from_its_header(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    data = too_large()[kind]
    with pytest.raises(InvalidRequestError, match="are allowed"):
        open_image(data, ImageLimits())
    assert not recwarn


GARBAGE = {
    "empty": b"",
    "text": b"hello, I am no image",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "truncated jpeg": encoded(picture(300, 200), "JPEG")[:3000],
    "jpeg header only": encoded(picture(300, 200), "JPEG")[:20],
    "truncated png": encoded(picture(300, 200))[:3000],
    "truncated webp": encoded(picture(300, 200), "WEBP")[:3000],
    "truncated avif": encoded(picture(300, 200), "AVIF")[:1000],
    "truncated tiff": encoded(picture(300, 200), "TIFF")[:3000],
    "webp size only": b"RIFF\x20\0\0\0WEBPVP8X",
    "tiff without image": b"II*\x00\x08\0\0\0\0\0",
    "png of zero width": png_header(0, 10),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_what_is_no_image_is_refused_in_our_words(kind: str) -> None:
    with pytest.raises(MediaError) as caught:
        item_of(GARBAGE[kind])
    assert len(caught.value.message) < 100
    assert "PIL" not in caught.value.message


def test_flipped_bytes_never_raise_anything_else() -> None:
    rng = np.random.default_rng(3)
    for form in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"):
        good = encoded(picture(64, 48), form)
        for _ in range(60):
            bad = bytearray(good)
            for position in rng.integers(0, len(bad), 8):
                bad[position] = rng.integers(256)
            with contextlib.suppress(MediaError, InvalidRequestError):
                item_of(bytes(bad))


def test_a_jpeg_of_very_many_scans_is_refused_but_bytes_that_look_like_scans_are_not() -> None:
    good = encoded(picture(64, 48), "JPEG", progressive=True)
    scans = formats._num_progressive_scans(good)
    assert 2 <= scans <= 20
    last = good.rindex(b"\xff\xda")
    many = good[:last] + good[last:-2] * 120 + b"\xff\xd9"
    with pytest.raises(MediaError, match="scans"):
        open_image(many, ImageLimits())
    motion_photo = good + b"\xff\xda" * 500  # a film appended to the picture
    assert formats._num_progressive_scans(motion_photo) == scans
    assert formats._num_progressive_scans(encoded(picture(64, 48), "JPEG")) == 0


@pytest.mark.parametrize("size", [(1, 201), (4000, 19)])
def test_a_picture_too_narrow_for_the_model_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="too narrow"):
        item_of(encoded(Image.new("RGB", size)))


def test_rules_are_read_from_every_kind_of_configuration(tmp_path: Path) -> None:
    old = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    assert PatchRules.read(tmp_path) == QWEN25
    new = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16}
    new |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": new}))
    assert PatchRules.read(tmp_path) == QWEN3
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"resample": 2}}))
    with pytest.raises(ValueError, match="resample is 2"):
        PatchRules.read(tmp_path)
