"""The text that stands for a picture in a prompt: one placeholder for each row of the decoder, and the marks between.

    "<image>" --expand--> "<image><image>...", tokenised once with the text around it --spans--> where the rows go

Placeholders are written by the chat template alone: a message that holds one is refused.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby

from cairn.core.errors import RequestError
from cairn.models.tokenizer import Tokenizer
from cairn.models.vision.picture import Picture
from cairn.models.vision.spec import VisionSpec

BREAK, END = "[IMG_BREAK]", "[IMG_END]"  # of Pixtral: behind each row of patches, behind the last
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"  # of Idefics 3


class Placeholders:
    """Placeholders of images in the prompts of a model."""

    def __init__(
        self,
        spec: VisionSpec,
        token: str,
        begin: str = "",
        end: str = "",
        video: str = "",
        step: tuple[str, str] = ("", ""),
    ) -> None:
        """`token`: the text of a row's placeholder; `begin`: what a template writes instead, `end`: what ends it.

        `video`: of a row of a video; `step`: what stands around those of one of its steps.
        """
        self.spec, self.token = spec, token
        self.begin, self.end = begin, end
        self.mark = begin or token  # one for each picture in a rendered conversation
        self.video, self.step = video, step

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts that must not occur in messages."""
        return tuple(one for one in dict.fromkeys((self.mark, self.token, self.video)) if one)

    def expanded(self, text: str, pictures: Sequence[Picture]) -> str:
        """A rendered conversation with the rows of its pictures in their places."""
        around = self.step[0] + self.video + self.step[1]  # each step has its own instead
        places = [re.escape(one) for one in dict.fromkeys((self.mark, around, self.video)) if one]
        first, *rest = re.split(f"({'|'.join(places)})", text)
        videos = [picture.frame_s > 0 for picture in pictures]
        place_videos = [bool(self.video) and self.video in mark for mark in rest[::2]]
        if videos != place_videos:
            raise RequestError(
                f"the prompt has {len(place_videos)} places for pictures and videos ({sum(place_videos)} of them for "
                f"videos), and {len(videos)} ({sum(videos)}) are given",
                hint=f"the text of a message must not hold {self.mark}; a template may know no videos",
            )
        marks = map(self.marks, pictures)
        return first + "".join(mark + part for mark, part in zip(marks, rest[1::2], strict=True))

    def marks(self, picture: Picture) -> str:
        return (
            _of_video(self, picture)
            if picture.frame_s
            else EXPANSIONS[self.spec.family](self, picture)
        )

    def rows(self, picture: Picture) -> int:
        """Placeholders of a whole picture."""
        return rows_of(self.spec, picture)

    def spans(self, prompt: Sequence[int], pictures: Sequence[Picture]) -> list[list[range]]:
        """Ranges of placeholders in the prompt for each image."""
        by_picture: list[list[range]] = [[] for _ in pictures]
        left = [self.rows(picture) for picture in pictures]
        at, now = 0, 0
        tokens = {self.spec.image_token, self.spec.video_token}
        for is_row, run in groupby(prompt, tokens.__contains__):
            end = at + sum(1 for _ in run)
            while is_row and at < end:
                if now == len(pictures):
                    raise self._mismatch()
                count = min(end - at, left[now])
                by_picture[now].append(range(at, at + count))
                left[now] -= count
                at += count
                now += left[now] == 0
            at = end
        if now != len(pictures):
            raise self._mismatch()
        return by_picture

    def _mismatch(self) -> RequestError:
        return RequestError(
            "the prompt does not have as many placeholders as its pictures have rows",
            hint=f"the text of a message must not hold {self.token}",
        )


def placeholders_of(vision: VisionSpec, tokenizer: Tokenizer) -> Placeholders:
    """Create the placeholders of a model from its vocabulary."""
    named = [
        "" if token is None else tokenizer.token(token)
        for token in (vision.image_token, vision.begin_token, vision.end_token, vision.video_token)
    ]
    step = ("", "")
    if vision.step_tokens is not None:
        step = (tokenizer.token(vision.step_tokens[0]), tokenizer.token(vision.step_tokens[1]))
    return Placeholders(vision, *named, step=step)


def rows_of(spec: VisionSpec, picture: Picture) -> int:
    """Rows of a whole picture, all its tiles."""
    return spec.steps(picture.tiles) * spec.rows(picture.height, picture.width)


def _plain(places: Placeholders, picture: Picture) -> str:
    return places.token * places.rows(picture)


def _between_marks(places: Placeholders, picture: Picture) -> str:
    rows = places.token * places.rows(picture)
    return f"\n\n{places.begin}{rows}{places.end}\n\n"


def _in_lines(places: Placeholders, picture: Picture) -> str:
    cell = places.spec.cell
    line = places.token * (picture.width // cell)
    return BREAK.join([line] * (picture.height // cell)) + END


def _in_tiles(places: Placeholders, picture: Picture) -> str:
    rows = places.token * places.spec.rows(picture.height, picture.width)
    whole = f"{AROUND}{WHOLE}{rows}{AROUND}"
    if not picture.rows:
        return whole
    lines = [
        "".join(f"{AROUND}<row_{y + 1}_col_{x + 1}>{rows}" for x in range(picture.columns)) + "\n"
        for y in range(picture.rows)
    ]
    return "".join(lines) + "\n" + whole


def _of_video(places: Placeholders, video: Picture) -> str:
    """All rows in one run, or each step behind its time: the mean of its first and last frame's."""
    spec = places.spec
    if spec.step_tokens is None:
        return places.video * places.rows(video)
    rows, frames = places.video * spec.rows(video.height, video.width), spec.tower.frames
    steps = []
    for number in range(spec.steps(video.tiles)):
        last = min((number + 1) * frames, video.tiles) - 1
        time_s = (number * frames + last) / 2 * video.frame_s
        steps.append(f"<{time_s:.1f} seconds>{rows.join(places.step)}")
    return "".join(steps)


EXPANSIONS: dict[str, Callable[[Placeholders, Picture], str]] = {
    "llava": _plain,
    "pixtral": _in_lines,
    "idefics3": _in_tiles,
    "gemma3": _between_marks,
    "paligemma": _plain,
    "qwen2_vl": _plain,
    "qwen2_5_vl": _plain,
    "qwen3_vl": _plain,
}
