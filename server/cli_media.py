"""The command line's options about images, videos and sound."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from ftserve.server.config import MediaConfig

Number = Callable[[str], float]

_LIMITED = ("image", "video", "audio")


def add_media_options(parser: argparse.ArgumentParser, amount: Number, amount_or_none: Number) -> None:
    """Add the group; `amount` and `amount_or_none` are argparse types for positive numbers, and for those and 0."""
    defaults = MediaConfig()
    group = parser.add_argument_group("images, videos and sound")
    group.add_argument(
        "--mm-cache-gb",
        type=amount_or_none,
        default=defaults.cache_gb,
        help="GiB of decoded images, videos and sound that are kept; 0 keeps none",
    )
    group.add_argument(
        "--limit-mm-per-prompt",
        type=_limits,
        default=f"image={defaults.max_images},video={defaults.max_videos},audio={defaults.max_audios}",
        metavar="image=N,video=N,audio=N",
        help="how many of each one prompt may have; as JSON too",
    )
    group.add_argument(
        "--allowed-local-media-path",
        type=_folder,
        default=None,
        metavar="FOLDER",
        help="serve file: URLs of files in here; without it, none",
    )
    group.add_argument(
        "--allowed-media-domains",
        action="append",
        metavar="HOST",
        help="fetch URLs from this host alone, private addresses included; can be given several times; .example.com is "
        "all below it; without it, every host with public addresses",
    )
    group.add_argument(
        "--media-fetch-timeout", type=amount, default=defaults.fetch_timeout_s, help="seconds until a fetch is given up"
    )
    group.add_argument(
        "--max-media-mb",
        type=amount,
        default=defaults.max_file_mb,
        help="MiB of one image, video or clip of sound as it is sent",
    )
    group.add_argument("--max-image-megapixels", type=amount, default=defaults.max_megapixels, help="size of one image")
    group.add_argument(
        "--max-video-seconds", type=amount, default=defaults.max_video_seconds, help="length of one video"
    )
    group.add_argument(
        "--max-audio-seconds",
        type=amount,
        default=defaults.max_audio_seconds,
        help="length of one clip of sound; never more than the model can hear",
    )
    group.add_argument(
        "--decoding-megapixels",
        type=amount,
        default=defaults.decoding_megapixels,
        help="of all images and videos that are being decoded at once; sound counts as three bytes a pixel",
    )
    group.add_argument(
        "--waiting-megapixels",
        type=amount_or_none,
        default=defaults.waiting_megapixels,
        help="of all that wait to be decoded; more get 429",
    )


def media_config(options: argparse.Namespace) -> MediaConfig:
    """Return what the options say."""
    limits: dict[str, int] = options.limit_mm_per_prompt
    defaults = MediaConfig()
    return MediaConfig(
        cache_gb=options.mm_cache_gb,
        max_images=limits.get("image", defaults.max_images),
        max_videos=limits.get("video", defaults.max_videos),
        max_audios=limits.get("audio", defaults.max_audios),
        max_file_mb=options.max_media_mb,
        max_megapixels=options.max_image_megapixels,
        max_video_seconds=options.max_video_seconds,
        max_audio_seconds=options.max_audio_seconds,
        decoding_megapixels=options.decoding_megapixels,
        waiting_megapixels=options.waiting_megapixels,
        allowed_local_path=options.allowed_local_media_path,
        allowed_domains=tuple(domain.lower() for domain in options.allowed_media_domains or ()),
        fetch_timeout_s=options.media_fetch_timeout,
    )


def _limits(text: str) -> dict[str, int]:
    try:
        if text.lstrip().startswith("{"):
            limits = {str(name): count for name, count in json.loads(text).items()}
        else:
            limits = {name.strip(): int(count) for name, count in (part.split("=") for part in text.split(","))}
    except ValueError:
        limits = {"": 0}
    if not all(name in _LIMITED and type(count) is int and count >= 0 for name, count in limits.items()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form image=N,video=N,audio=N")
    return limits


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path
