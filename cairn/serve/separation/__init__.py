"""Prefill and decode on engines of their own: one computes a prompt, the other goes on with its pages.

    request --> PrefillSide --Handoff--> DecodeSide --> outputs
                engine A     (a router)  engine B
                pages  ------transfer--> pages            tcp | shm | nixl, see `cairn.comm.transfer`

    handover_blocks   whose pages may be freed when: a block manager for both sides (pure)
    memory    where an engine's pages lie, as the transfer sees them
    prefill, decode   the two sides, driven by `step`; sender_thread: answers readers meanwhile
    streaming   pages on offer while the next chunk of their prompt is computed
    roles, prefill_client   one side as the engine of a server, and the way from one role to another
    remote_prefill_policy   whether a prompt is computed elsewhere (pure)
    pair, timed_answers   both together, in one process or in two, and one engine beside them: what labs call

Tokens are those of one engine. If pages do not come, the decode side computes the prompt itself.
"""
