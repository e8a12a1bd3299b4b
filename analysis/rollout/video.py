"""Videos: read as a stream, written side by side, and an animated preview.

    with Video("a.mp4") as video:
        video.width, video.height, video.rate, len(video)      # pixels, pixels, frames a second, frames
        for frames in video.chunks(16): ...                    # uint8 [16, H, W, 3], the last one shorter
    write_mp4("out.mp4", side_by_side(panels), rate=17.5)

MP4 needs `imageio-ffmpeg` (extra `video`), which brings its own ffmpeg; the preview needs Pillow only. H.264 loses
information: scores of videos that were stored so are scores of what a viewer gets, codec included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from analysis.results.schema import replacing

AMPLIFIED = 8  # times the difference, around mid grey
_HEADER = 16  # pixels above each row of panels


def ffmpeg() -> Any:
    """The module imageio_ffmpeg; ValueError where it is not installed."""
    try:
        import imageio_ffmpeg
    except ImportError:
        raise ValueError("reading and writing MP4 needs ffmpeg: pip install 'int8-shrinkage[video]'") from None
    return imageio_ffmpeg


class Video:
    """A video file, decoded frame by frame.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a video.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path} does not exist; give the path of a video file")
        library = ffmpeg()
        self._frames: Iterator[Any] = library.read_frames(str(self.path))
        try:
            meta = next(self._frames)
            self._length, _ = library.count_frames_and_secs(str(self.path))
        except (OSError, RuntimeError, StopIteration) as error:
            raise ValueError(f"{path} is not a video that ffmpeg can read: {str(error)[:200]}") from None
        self.width, self.height = meta["size"]
        self.rate = float(meta["fps"])

    def __len__(self) -> int:
        return int(self._length)

    def __str__(self) -> str:
        return f"{self.path} ({len(self)} frames of {self.width}x{self.height} at {self.rate:g} a second)"

    def __enter__(self) -> Video:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._frames.close()  # type: ignore[attr-defined]  # a generator: ends its ffmpeg process

    def chunks(self, size: int) -> Iterator[np.ndarray]:
        """uint8 [n, H, W, 3] with n = size, and fewer at the end."""
        held: list[np.ndarray] = []
        for data in self._frames:
            held.append(np.frombuffer(data, np.uint8).reshape(self.height, self.width, 3))
            if len(held) == size:
                yield np.stack(held)
                held = []
        if held:
            yield np.stack(held)


def check_same_format(videos: Mapping[str, Video]) -> None:
    """Raise ValueError unless all videos have one size, rate and number of frames."""
    formats = {(v.width, v.height, round(v.rate, 3), len(v)) for v in videos.values()}
    if len(formats) > 1:
        listed = "; ".join(f"{name}: {video}" for name, video in videos.items())
        raise ValueError(f"videos differ in size, rate or length and cannot be compared frame by frame: {listed}")


def side_by_side(panels: Mapping[str, np.ndarray], scale: int = 1) -> Iterator[np.ndarray]:
    """Frames with the panels next to each other, named above; uint8 [T, H, W, 3] each, enlarged `scale` times.

    Yields uint8 [H', W', 3], both even as video codecs want it.
    """
    strips = [_header(name, frames.shape[2] * scale) for name, frames in panels.items()]
    header = np.concatenate(strips, axis=1)
    for row in zip(*panels.values(), strict=True):
        wide = np.concatenate([frame.repeat(scale, 0).repeat(scale, 1) for frame in row], axis=1)
        whole = np.concatenate([header, wide], axis=0)
        yield np.pad(whole, ((0, whole.shape[0] % 2), (0, whole.shape[1] % 2), (0, 0)))


def _header(name: str, width: int) -> np.ndarray:
    strip = Image.new("RGB", (width, _HEADER), "white")
    ImageDraw.Draw(strip).text((4, 1), name, fill="black", font=ImageFont.load_default(11))
    return np.asarray(strip)


def difference(frames: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """AMPLIFIED times frames - reference around mid grey, uint8 of the same shape."""
    wide = frames.astype(np.int16) - reference.astype(np.int16)
    return np.clip(128 + AMPLIFIED * wide, 0, 255).astype(np.uint8)


def comparison(shown: Mapping[str, np.ndarray], scene: int, subject: str = "shipped") -> dict[str, np.ndarray]:
    """Panels of one scene: every mode of a closed loop but fp32, then the amplified difference of `subject` to bf16.

    shown: mode -> uint8 [scenes, T, H, W, 3], with 'bf16'.
    """
    panels = {mode: frames[scene] for mode, frames in shown.items() if mode != "fp32"}
    last = subject if subject in panels else next(mode for mode in panels if mode != "bf16")
    return panels | {f"{AMPLIFIED} x ({last} - bf16)": difference(panels[last], panels["bf16"])}


def write_mp4(path: str | Path, frames: Iterable[np.ndarray], rate: float) -> None:
    """Write uint8 [H, W, 3] frames as H.264; the file appears whole or not at all."""
    library = ffmpeg()
    with replacing(path) as temporary:
        writer = None
        try:
            for frame in frames:
                if writer is None:
                    height, width = frame.shape[:2]
                    writer = library.write_frames(
                        str(temporary),
                        (width, height),
                        fps=rate,
                        quality=8,
                        macro_block_size=2,
                        ffmpeg_log_level="error",
                    )
                    writer.send(None)
                writer.send(np.ascontiguousarray(frame))
        finally:
            if writer is not None:
                writer.close()
        if writer is None:
            raise ValueError(f"no frame to write to {path}")


def write_webp(path: str | Path, frames: Iterable[np.ndarray], rate: float, quality: int = 70) -> None:
    """Write uint8 [H, W, 3] frames as an animated WebP that loops."""
    pictures = [Image.fromarray(frame) for frame in frames]
    if not pictures:
        raise ValueError(f"no frame to write to {path}")
    with replacing(path) as temporary:
        pictures[0].save(
            temporary,
            format="WEBP",
            save_all=True,
            append_images=pictures[1:],
            duration=round(1000 / rate),
            loop=0,
            quality=quality,
            method=4,
        )
