"""A GGUF file of any size without a download: the shape of a model, random blocks, the tokenizer of a small one.

    python benchmarks/random_gguf.py SMALL.gguf LARGE.gguf --type Q4_0
    python benchmarks/cpu_gguf.py LARGE.gguf ...

Its text means nothing; memory, time to ready and speed are those of a real file of that shape. Matrices have one type;
the embedding, which is the output projection as well, is Q8_0; norms are ones. Q4_K_M is the mix of that name: Q4_K,
and Q6_K for the embedding and every second matrix of values and of those that lead back to the residual. The small file
is one of a Llama. The command that made the file is in its metadata, from where `cpu_gguf.py` takes it into its record.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np

from cairn.bench.record import program_command

COMMAND = "cairn.command"  # of the metadata
SCALE = 2.0**-8  # between levels of a block: values of about the size that trained ones have
# Bytes and values of a block, where its scales are, and what multiplies SCALE to each of them.
KINDS = {
    "Q4_0": (18, 32, {0: 1.0}), "Q4_1": (20, 32, {0: 1.0, 2: -7.5}), "Q8_0": (34, 32, {0: 1 / 16}),
    "IQ4_NL": (18, 32, {0: 1 / 16}), "Q4_K": (144, 256, {0: 1 / 32, 2: 7.5 / 32}), "Q6_K": (210, 256, {208: 1 / 256}),
}  # fmt: skip
SKIPPED = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")
ROWS_AT_ONCE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path)
    parser.add_argument("--type", choices=[*KINDS, "Q4_K_M"], default="Q4_0")
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, help="as many as heads, unless given")
    options = parser.parse_args()
    options.kv_heads = options.kv_heads or options.heads
    reader = gguf.GGUFReader(options.small)
    writer = gguf.GGUFWriter(options.large, "llama")
    copy_fields(reader, writer, options)
    writer.add_string(COMMAND, program_command())
    vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    add_tensors(writer, options, vocab)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_fields(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, options: argparse.Namespace
) -> None:
    """Those of the small file, but for its shape."""
    shape = {
        "llama.block_count": options.layers,
        "llama.embedding_length": options.width,
        "llama.feed_forward_length": options.inner,
        "llama.attention.head_count": options.heads,
        "llama.attention.head_count_kv": options.kv_heads,
        "llama.rope.dimension_count": options.width // options.heads,
    }
    for name, field in reader.fields.items():
        if name not in SKIPPED:
            kinds = field.types
            inner = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, shape.get(name, field.contents()), kinds[0], inner)


def add_tensors(writer: gguf.GGUFWriter, options: argparse.Namespace, vocab: int) -> None:
    chance = np.random.default_rng(0)
    width, inner = options.width, options.inner
    shared = width // options.heads * options.kv_heads
    shapes = {
        **dict.fromkeys(("attn_q", "attn_output"), (width, width)),
        **dict.fromkeys(("attn_k", "attn_v"), (shared, width)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, width)),
        "ffn_down": (width, inner),
    }

    def add(name: str, rows: int, columns: int, kind: str) -> None:
        dtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", blocks(chance, rows, columns, kind), raw_dtype=dtype)

    mixed = options.type == "Q4_K_M"
    add("token_embd", vocab, width, "Q6_K" if mixed else "Q8_0")
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(options.layers):
        for name, (rows, columns) in shapes.items():
            finer = layer % 2 and name in ("attn_v", "ffn_down")
            kind = ("Q6_K" if finer else "Q4_K") if mixed else options.type
            add(f"blk.{layer}.{name}", rows, columns, kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))


def blocks(chance: np.random.Generator, rows: int, columns: int, kind: str) -> np.ndarray:
    """Rows of packed blocks: random levels, the same scales."""
    size, values, scales = KINDS[kind]
    made = np.empty((rows, columns // values, size), np.uint8)
    for first in range(0, rows, ROWS_AT_ONCE):
        part = made[first : first + ROWS_AT_ONCE]
        part[:] = chance.integers(0, 256, part.shape, np.uint8)
        for at, factor in scales.items():
            part[:, :, at : at + 2] = np.frombuffer(np.float16(SCALE * factor).tobytes(), np.uint8)
    return made.reshape(rows, -1)


if __name__ == "__main__":
    main()
