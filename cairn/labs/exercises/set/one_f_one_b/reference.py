"""What a stage of a pipeline does, in order."""

Action = tuple[str, int]  # ("F" or "B", micro-batch)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Action]:
    # begin answer
    warmup = min(stages - stage - 1, microbatches)
    fill = [("F", m) for m in range(warmup)]
    steady: list[Action] = []
    for m in range(microbatches - warmup):
        steady += [("F", warmup + m), ("B", m)]
    drain = [("B", m) for m in range(microbatches - warmup, microbatches)]
    return fill + steady + drain
    # end answer
