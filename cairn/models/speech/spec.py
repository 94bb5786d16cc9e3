"""Specification of a Whisper model and its control tokens. No torch, no files."""

import msgspec

MULTILINGUAL = 51865  # tokens of the models that know more than English, at least


class WhisperSpec(msgspec.Struct, frozen=True, kw_only=True):
    bins: int  # of the spectrogram
    hidden: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    intermediate: int
    vocab: int
    frames: int = 1500  # positions of the encoder: half of the spectrogram's
    context: int = 448  # positions of the decoder
    multilingual: bool = True

    @property
    def parameters(self) -> int:
        square, wide = self.hidden * self.hidden, self.hidden * self.intermediate
        encoder = self.encoder_layers * (4 * square + 2 * wide)
        decoder = self.decoder_layers * (8 * square + 2 * wide)
        return encoder + decoder + self.vocab * self.hidden


class SpeechTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that are not text."""

    start: int
    end: int
    transcribe: int | None
    translate: int | None
    no_timestamps: int
    no_speech: int | None
    previous: int | None  # before the text of what came earlier
    languages: dict[str, int] = {}  # by code: "en"
    suppressed: tuple[int, ...] = ()  # never said
    suppressed_first: tuple[int, ...] = ()  # never said first

    @property
    def first_timestamp(self) -> int:
        """0.00 s; the following ones are 0.02 s apart."""
        return self.no_timestamps + 1
