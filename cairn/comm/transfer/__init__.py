"""Bytes from the layout they have to the layout that is wanted: KV pages, checkpoints, fresh weights.

    shard + byte_runs + plan      which bytes go where (pure)          kv, weights: what a rank holds, as shards
    handshake + lease             who may read what, and until when (pure, on a clock that is passed in)
    transport                     how: tcp, shm or nixl
    page_sender + page_receiver   the two ends of a hand-over; layers or chunks while the next one is computed

Nothing here reaches torch; memory is anything with a buffer, or an address.
"""
