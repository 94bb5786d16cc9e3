"""Pages of the KV cache beyond the device: pinned host memory first, then segments on a disk.

    prefix cache (device) --a step has landed--> host slots --a thread--> disk segments
             ^------------- a request is admitted, and loading is faster than computing -------'

1. A page is stored when the step that filled it has landed, by a copy on a stream of its own; eviction on the device
   then costs nothing. A page of a window is stored only where a request is likely to branch off, or at its end.
2. The key is the digest of the prefix cache and the group: salt, adapter and version of the weights are in it.
3. At admission the scheduler asks `PageTiers.begin`. `load_plan` decides in seconds: load, compute, or both ends (the
   front is computed while the tail arrives). Pages are loaded into the request's own table.
4. A request that waits holds its row and pages, computes nothing, and keeps no other from computing.
5. When the last byte is there, `computed` jumps over the loaded pages, and others find them in the prefix cache.
6. A load that fails gives the pages back and puts the request in line again; the damaged page is forgotten first.
7. A page that is freed while a copy reads or writes it makes the device's next step wait for that copy, not the host.
8. Full tiers evict what costs the fewest seconds to compute again per byte, the tail of a prefix before its head.

    load_plan, slot_table  pure: what to load, what to evict        host_slots, page_copies   pinned memory, copies
    disk_segments          files, checksums, other models refused   page_tiers                all of it for one engine

Layers that keep a state, and engines of several ranks (which would see copies end at different steps), are refused.
"""
