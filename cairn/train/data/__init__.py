"""Training data: from text files to packed samples, each a pure function of its number.

    txt, jsonl, parquet --tokenize--> token store --sampler, packing--> Batch
    procedural, Megatron, llm.c ----------------------^

The modules that read, write and choose know nothing of torch; only `batch` and what builds batches does.
"""
