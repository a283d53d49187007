"""Where rows hold images, video or audio, and how to take them out.

A target that reads text is not asked a question about a picture: such a row is refused, unless the
configuration says that its text alone will do.
"""

from __future__ import annotations

import re
from typing import Any

_ENDINGS = ("", "s", "_path", "_paths", "_url", "_urls", "_file", "_files")
MEDIA_COLUMNS = frozenset(
    {kind + ending for kind in ("image", "video", "audio", "img") for ending in _ENDINGS}
    | {"picture", "pictures", "media", "pixel_values"}
)
MEDIA_PARTS = frozenset(
    {"image", "image_url", "input_image", "image_path", "image_base64", "image_binary"}
    | {"video", "video_url", "input_video", "audio", "audio_url", "input_audio", "file", "input_file"}
)
_PAYLOADS = MEDIA_PARTS - {"file"}
# A placeholder stands where a text begins or ends; elsewhere <image> is somebody's XML. HTML closes no <img>.
_PLACEHOLDERS = ("<image>", "<video>", "<audio>", "<IMG_CONTEXT>")
_CLOSED_IMAGE = re.compile(r"<img>[^<>]*</img>")


def names_media(text: str) -> bool:
    """Whether a text holds a placeholder of a picture, a video or a sound, or the address of a picture."""
    if "<" not in text:
        return False
    bare = text.strip()
    return bare.startswith(_PLACEHOLDERS) or bare.endswith(_PLACEHOLDERS) or bool(_CLOSED_IMAGE.search(text))


def has_media_column(row: Any) -> bool:
    """Whether a column of a row is filled with images, video or audio."""
    if not isinstance(row, dict) or MEDIA_COLUMNS.isdisjoint(row):
        return False
    return any(row.get(name) for name in MEDIA_COLUMNS)


def is_media_part(part: Any) -> bool:
    """Whether a part of a content is no text: by its type or, where it has none, by its key."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return kind in MEDIA_PARTS if isinstance(kind, str) else not _PAYLOADS.isdisjoint(part)


def without_media(row: Any) -> tuple[Any, bool]:
    """The row without media columns, parts and placeholders, and whether there were any."""
    cleaned = _cleaned(row)
    if isinstance(cleaned, dict):
        cleaned = {name: value for name, value in cleaned.items() if name not in MEDIA_COLUMNS}
    return cleaned, cleaned != row


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _without_placeholders(value)
    if isinstance(value, dict):
        return {key: _cleaned(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cleaned(inner) for inner in value if not is_media_part(inner)]
    return value


def _without_placeholders(text: str) -> str:
    while names_media(text):
        text = _CLOSED_IMAGE.sub("", text).strip()
        for placeholder in _PLACEHOLDERS:
            text = text.removeprefix(placeholder).removesuffix(placeholder).strip()
    return text
