"""A program of Tinker's SDK: supervised steps, a policy-gradient step, saving, going on. Prints what it saw as JSON."""

import json
import sys

import numpy as np
import tinker
from tinker import types

TEXT = "The capital of Atlantis is Zorbaville."
PROMPT = "The capital of Atlantis is"


def tensor(values, dtype):
    return types.TensorData.from_numpy(np.array(values, dtype))


def supervised(ids):
    weights = [0.0, *[1.0] * (len(ids) - 2)]
    inputs = {"target_tokens": tensor(ids[1:], np.int64), "weights": tensor(weights, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def sampled(prompt, sequence, advantage):
    """The log-probabilities of the sampler count as those of the policy that sampled."""
    ids, before = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tensor(ids[1:], np.int64),
        "logprobs": tensor([*before, *sequence.logprobs], np.float32),
        "advantages": tensor([*before, *[advantage] * len(sequence.tokens)], np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def likelihood(client, prompt, answer):
    values = client.compute_logprobs(types.ModelInput.from_ints([*prompt, *answer])).result()
    return sum(values[len(prompt) :])


def main(url: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    seen: dict = {
        "models": [m.model_name for m in service.get_server_capabilities().supported_models]
    }
    client = service.create_lora_training_client(base_model=model, rank=8, seed=1)
    tokenizer = client.get_tokenizer()
    ids, prompt = tokenizer.encode(TEXT), tokenizer.encode(PROMPT)
    data = [supervised(ids), supervised(ids[:-2])]

    losses = []
    for _ in range(8):
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    seen["losses"], seen["logprobs"] = losses, [len(one["logprobs"].data) for one in outputs]

    sampler = client.save_weights_and_get_sampling_client()
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0)
    answer = sampler.sample(types.ModelInput.from_ints(prompt), 1, greedy).result().sequences[0]
    seen["answer"] = tokenizer.decode(answer.tokens)
    stop = types.SamplingParams(max_tokens=6, temperature=0.0, stop=["bav"])
    ended = sampler.sample(types.ModelInput.from_ints(prompt), 1, stop).result().sequences[0]
    seen["stopped"] = [tokenizer.decode(ended.tokens), ended.stop_reason]

    base = service.create_sampling_client(base_model=model)
    seen["base"] = likelihood(base, prompt, answer.tokens)
    trainer = client.forward([sampled(prompt, answer, 0.0)], "importance_sampling").result()
    there = trainer.loss_fn_outputs[0]["logprobs"].data[len(prompt) - 1 :]
    seen["mismatch"] = float(np.abs(np.array(there) - np.array(answer.logprobs)).max())

    # The answer is punished: afterwards it is less likely, and the sampler from before has not changed.
    before = likelihood(sampler, prompt, answer.tokens)
    client.forward_backward([sampled(prompt, answer, -1.0)], "ppo", {"clip_high_threshold": 1.3})
    client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    later = client.save_weights_and_get_sampling_client()
    seen["punished"] = [before, likelihood(later, prompt, answer.tokens)]
    seen["kept"] = likelihood(sampler, prompt, answer.tokens)

    saved = client.save_state("one").result().path
    other = service.create_training_client_from_state_with_optimizer(saved)
    both = []
    for one in (client, other):
        one.forward_backward(data, "cross_entropy").result()
        one.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        both.append(one.forward(data, "cross_entropy").result().metrics["loss:sum"])
    seen["resumed"] = both
    seen["path"] = client.save_weights_for_sampler("served").result().path
    seen["errors"] = [refused(lambda: client.forward_backward(data, "no such loss").result())]
    seen["errors"].append(refused(lambda: client.forward_backward(data, "ppo").result()))
    seen["errors"].append(refused(lambda: client.save_state("one").result()))
    seen["errors"].append(refused(lambda: service.create_lora_training_client(model, rank=999)))
    print(json.dumps(seen))


def refused(call) -> str:
    try:
        call()
    except Exception as problem:  # noqa: BLE001 (the SDK has many kinds)
        return str(problem)
    return "accepted"


if __name__ == "__main__":
    main(*sys.argv[1:])
