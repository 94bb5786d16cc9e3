"""Each part on its own: the loss over a cut vocabulary, ring blocks, rows, later weight gradients, balance."""

import msgspec
import pytest
import torch
import torch.nn.functional as F
from forked import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from spread_training import SEED, batches, spec_of, train
from torch import nn
from torch.overrides import TorchFunctionMode

from cairn.core.errors import ConfigError
from cairn.models.attend import AttentionRule, PackedDocuments
from cairn.models.build import ModelBuild, Slot
from cairn.models.linear.maps import Vocabulary
from cairn.train.config import Optim
from cairn.train.objective import Objective, token_losses
from cairn.train.optim.optimizer import make_optimizer
from cairn.train.parallel import context
from cairn.train.parallel.balance import BalancedRouter
from cairn.train.parallel.buckets import Buckets, fill
from cairn.train.parallel.context import Ring, chunks_of, indices, local_batch
from cairn.train.parallel.expert import SpreadExperts
from cairn.train.parallel.gradients import Gradients
from cairn.train.parallel.layout import Balance, Layout, Strategy
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize
from cairn.train.parallel.pipeline.deferred import compute_deferred, deferring
from cairn.train.parallel.pipeline.run import _Step
from cairn.train.parallel.ring_blocks import Chunk, backward_block, block_of, forward_block, merge
from cairn.train.parallel.ring_kernels import backward_kernel, forward_kernel
from cairn.train.parallel.rows import Rows, pieces_of_rows, rows_of
from cairn.train.parallel.stage import share_of
from cairn.train.parallel.tensor import TensorShards
from cairn.train.parallel.vocabulary import log_probs
from cairn.train.parallel.zero import Zero

# -- the loss over a vocabulary that is cut ---------------------------------------------------


def vocabulary_and_inputs(vocab, shards=None):
    build = ModelBuild("cpu", torch.float32, *([shards] if shards else []))
    whole = torch.randn(vocab, 8, generator=torch.Generator().manual_seed(1))
    layer = Vocabulary(build, vocab, 8)
    first = layer.rows * (shards.rank if shards else 0)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[: max(0, min(layer.rows, vocab - first))] = whole[first : first + layer.rows]
    hidden_TD = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    targets_T = torch.tensor([0, vocab - 1, -100, 4, 2, 3])
    return layer, hidden_TD, targets_T


def sharded_loss(rank, world, vocab, softcap, z_loss):
    import torch.distributed as dist

    layer, hidden_TD, targets_T = vocabulary_and_inputs(vocab, TensorShards(dist.group.WORLD))
    logp_T, lse_T = log_probs(hidden_TD, layer, targets_T, softcap)
    losses_T = -logp_T + z_loss * lse_T.square()
    (losses_T * torch.arange(1.0, 7.0)).sum().backward()
    return losses_T.detach(), hidden_TD.grad, layer.weight.grad


@pytest.mark.parametrize(
    ("vocab", "softcap", "z_loss"), [(12, 0.0, 0.0), (11, 3.0, 0.01), (5, 0.0, 0.1)]
)
def test_loss_over_a_cut_vocabulary(vocab, softcap, z_loss):
    layer, hidden_TD, targets_T = vocabulary_and_inputs(vocab)
    losses_T = token_losses(layer.logits(hidden_TD), targets_T, softcap, z_loss)
    (losses_T * torch.arange(1.0, 7.0)).sum().backward()
    results = run_ranks(3, sharded_loss, vocab, softcap, z_loss)
    for mine_T, hidden, _ in results:
        torch.testing.assert_close(mine_T, losses_T.detach())
        torch.testing.assert_close(hidden, hidden_TD.grad)
    gathered = torch.cat([weight for _, _, weight in results])[:vocab]
    torch.testing.assert_close(gathered, layer.weight.grad)


# -- context ----------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from(["ring", "ulysses"]))
def test_every_token_is_on_one_rank_and_work_is_even(size, width, kind):
    tokens = width * size * 2
    shares = [indices(tokens, rank, size, kind) for rank in range(size)]
    assert torch.cat(shares).sort().values.tolist() == list(range(tokens))
    if kind == "ring":  # pairs that a causal mask leaves, by chunks: alike everywhere
        assert len({sum(c + 1 for c in chunks_of(rank, size, kind)) for rank in range(size)}) == 1


def test_tokens_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"10 tokens of a microbatch % 4 = 2, with cp 2 and ring"):
        indices(10, 0, 2, "ring")


def test_alone_the_batch_stays_as_it_is():
    (batch,) = batches(spec_of("tiny-llama"), 0, 1)
    assert local_batch(batch, None, "ring") is batch


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([0, 3, 7]),
    st.sampled_from([0.0, 2.0]),
    st.integers(1, 4),
)
def test_blocks_add_up_to_attention(lengths, window, softcap, width):
    """Any cut into chunks, any documents: the merged blocks are the whole, forward and backward."""
    tokens = sum(lengths)
    rule = AttentionRule(0, 0.3, window, softcap)
    q, g = torch.randn(tokens, 4, 8), torch.randn(tokens, 4, 8)
    k, v = torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = PackedDocuments(lengths)(*whole, rule)
    expected.backward(g)
    documents_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    starts = range(0, tokens, width)
    chunks = [
        Chunk.of(i, s, documents_T[s : s + width], torch.device("cpu"))
        for i, s in enumerate(starts)
    ]
    spans = [slice(s, min(s + width, tokens)) for s in starts]
    meetings = [
        (x, y, block_of(a, b, window))
        for a, x in zip(chunks, spans, strict=True)
        for b, y in zip(chunks, spans, strict=True)
    ]
    blocks = [(moved(x, b.rows), moved(y, b.keys), b) for x, y, b in meetings if b is not None]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"))
    for rows, keys, block in blocks:
        merge(out[rows], lse[rows], *forward_block(q[rows], k[keys], v[keys], block, rule))
    torch.testing.assert_close(out, expected.detach(), atol=2e-5, rtol=1e-4)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys, block in blocks:
        parts = backward_block(
            q[rows], k[keys], v[keys], g[rows], out[rows], lse[rows], block, rule
        )
        for total, part, at in zip(grads, parts, (rows, keys, keys), strict=True):
            total[at] += part
    for mine, x in zip(grads, whole, strict=True):
        torch.testing.assert_close(mine, x.grad, atol=2e-5, rtol=1e-4)


def moved(span, within):
    return slice(span.start + within.start, span.start + within.stop)


def one_block(diagonal, device):
    """Queries and keys of 64 columns: a chunk against itself, or against the end of the one before."""
    documents_T = torch.arange(3).repeat_interleave(torch.tensor([20, 70, 38]))
    chunks = [
        Chunk.of(i, 64 * i, documents_T[64 * i : 64 * (i + 1)], torch.device(device))
        for i in (0, 1)
    ]
    block = block_of(chunks[1], chunks[1] if diagonal else chunks[0], 0)
    make = torch.Generator().manual_seed(5)
    q, g = (torch.randn(block.rows.stop, 4, 64, generator=make).to(device) for _ in range(2))
    rows = block.keys.stop - block.keys.start
    k, v = (torch.randn(rows, 2, 64, generator=make).to(device) for _ in range(2))
    return block, q, k, v, g, AttentionRule(0, 0.125, 0, 0.0)


@pytest.mark.parametrize("diagonal", [True, False])
def test_a_block_by_the_kernel_s_reference_is_the_same(diagonal):
    block, q, k, v, _, rule = one_block(diagonal, "cpu")
    for mine, theirs in zip(
        forward_kernel(q, k, v, block, rule), forward_block(q, k, v, block, rule), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("diagonal", [True, False])
def test_a_block_by_the_kernels_is_the_same(diagonal):
    block, q, k, v, g, rule = one_block(diagonal, "cuda")
    low = [x.bfloat16() for x in (q, k, v)]
    out, lse = forward_block(*low, block, rule)
    for mine, theirs in zip(forward_kernel(*low, block, rule), (out, lse), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)
    rest = (
        g.bfloat16(),
        out.bfloat16(),
        lse + 0.5,
        block,
        rule,
    )  # as if other blocks had been seen
    for mine, theirs in zip(backward_kernel(*low, *rest), backward_block(*low, *rest), strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-2, rtol=5e-2)


# -- rows and pieces --------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 9))
def test_rows_are_cut_as_torch_cuts(total, size):
    mine = [rows_of(total, rank, size) for rank in range(size)]
    theirs = [len(part) for part in torch.arange(total).chunk(size)]
    assert [len(rows) for rows in mine if len(rows)] == [n for n in theirs if n]
    assert mine[0].start == 0
    assert mine[-1].stop == total


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_pieces_of_all_ranks_make_the_whole(first, second, size, cut):
    """Two tensors one above the other in a parameter, cut by rows over ranks; perhaps part of a wider one."""
    extra = 3 if cut else 0
    slots = [
        Slot(
            "a", "p", (first, 2 + extra), (slice(0, first),), (1, extra, 2 + extra) if cut else None
        ),
        Slot(
            "b",
            "p",
            (second + extra, 2),
            (slice(first, first + second),),
            (0, extra, second + extra) if cut else None,
        ),
    ]
    whole = torch.arange(2.0 * (first + second)).view(-1, 2)
    found = {"a": torch.full((first, 2 + extra), -1.0), "b": torch.full((second + extra, 2), -1.0)}
    for rank in range(size):
        rows = rows_of(len(whole), rank, size)
        if not len(rows):
            continue
        local = {"p": whole[rows.start : rows.stop]}
        for name, piece in pieces_of_rows(slots, local, {"p": rows}).items():
            at = tuple(
                slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True)
            )
            found[name][at] = piece.tensor
    assert torch.equal(found["a"][:, extra:], whole[:first])
    assert torch.equal(found["b"][extra:], whole[first:])


def test_a_stack_s_matrix_is_where_its_number_is():
    slot = Slot("3.up.weight", "stack", (2, 5), (3, slice(0, 2)))
    stack = torch.arange(40.0).view(4, 2, 5)
    assert not pieces_of_rows([slot], {"stack": stack[:2]}, {"stack": Rows(0, 2)})
    (piece,) = pieces_of_rows([slot], {"stack": stack[2:]}, {"stack": Rows(2, 4)}).values()
    assert torch.equal(piece.tensor, stack[3])
    assert piece.offsets == (0, 0)


@given(st.integers(1, 40), st.integers(1, 12))
def test_layers_are_shared_in_order_and_evenly(layers, stages):
    if stages > layers:
        return
    shares = [share_of(layers, s, stages).layers for s in range(stages)]
    assert [i for share in shares for i in share] == list(range(layers))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)  # the last has the vocabulary as well


# -- weight gradients later -------------------------------------------------------------------


def test_later_weight_gradients_are_the_same():
    layer, norm = nn.Linear(5, 4), nn.LayerNorm(4)
    x = torch.randn(7, 5, requires_grad=True)
    F.linear(norm(layer(x)), torch.ones(2, 4)).square().sum().backward()
    expected = [p.grad.clone() for p in (*layer.parameters(), *norm.parameters(), x)]
    for p in (*layer.parameters(), *norm.parameters(), x):
        p.grad = None
    deferred = []
    with deferring(deferred):
        y = F.linear(norm(layer(x)), torch.ones(2, 4)).square().sum()
    y.backward()
    assert layer.weight.grad is None
    assert len(deferred) == 1
    assert x.grad is not None
    assert layer.bias.grad is not None
    compute_deferred(deferred)
    for p, gradient in zip((*layer.parameters(), *norm.parameters(), x), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    assert not deferred


# -- buckets and sums of 16 bits --------------------------------------------------------------


def test_buckets_leave_in_order_once_each():
    parameters = {str(i): nn.Parameter(torch.randn(4)) for i in range(5)}
    launched = []
    buckets = Buckets(parameters, launched.append, most_bytes=32)
    assert list(fill(parameters, 32)) == [["4", "3"], ["2", "1"], ["0"]]
    buckets.arm()
    sum(parameters[n].square().sum() for n in ("0", "1", "2")).backward()
    assert launched == []  # the first bucket has no gradient yet, and goes first
    buckets.flush()
    assert launched == [["4", "3"], ["2", "1"], ["0"]]
    sum(p.square().sum() for p in parameters.values()).backward()
    assert len(launched) == 3  # nobody armed it


def test_gradients_of_16_bits_are_added_in_float32():
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    held = Gradients({"p": parameter})
    for addend in [256.0] + [1.0] * 256:  # each 1 would be lost beside 256
        parameter.grad = torch.tensor([addend], dtype=torch.bfloat16)
        held.collect()
    assert held.found()["p"].item() == 512.0
    assert held.found()["p"].dtype == torch.float32


def zero_step(rank, world, stage):
    import torch.distributed as dist

    parameters = {
        "a": nn.Parameter(torch.arange(10.0).view(5, 2)),
        "b": nn.Parameter(torch.ones(1)),
    }
    zero = Zero(parameters, dist.group.WORLD, stage, bucket_bytes=16)
    for _ in range(2):  # two microbatches
        zero.before_backward(last=False)
        (parameters["a"].sum() * (rank + 1) + parameters["b"].sum() * 10).backward()
        zero.after_backward()
    whole = sum(p.grad.numel() for p in parameters.values() if p.grad is not None)
    zero.finish()
    with torch.no_grad():
        for name, parameter in zero.parameters().items():
            parameter.sub_(zero.gradients()[name])
    zero.begin(1)
    return {name: p.detach() for name, p in parameters.items()}, whole, zero.rows


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_with_rows_that_do_not_divide(stage):
    for weights, whole, rows in run_ranks(3, zero_step, stage):
        torch.testing.assert_close(weights["a"], torch.arange(10.0).view(5, 2) - 2 * (1 + 2 + 3))
        torch.testing.assert_close(weights["b"], torch.ones(1) - 2 * 3 * 10)
        assert whole == (
            0 if stage == 2 else 11
        )  # stage 2 keeps no whole gradient between microbatches
        assert sum(len(span) for span in rows.values()) < 6


# -- experts ----------------------------------------------------------------------------------


BALANCED = Balance(loss=0.5, bias=0.01)
MOE = spec_of("tiny-moe", layers=2)


def balanced(rank, world, layout):
    parallel = parallelize(MOE, Mesh.join(layout), seed=SEED, balance=BALANCED)
    trace = train(parallel, MOE, 3, 4)
    biases = {path: r.bias_E for path, r in parallel.routers.items()}
    assert all(f"{path}.bias" in trace["weights"] for path in biases)
    return trace["losses"], trace["norms"], biases


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(cp=2), Layout(tp=2), Layout(pp=2)])
def test_balance_does_not_depend_on_the_layout(layout):
    losses, norms, biases = balanced(0, 1, Layout())
    assert any(bias.abs().max() > 0 for bias in biases.values())
    for mine, my_norms, my_biases in run_ranks(layout.world(), balanced, layout):
        assert mine == pytest.approx(losses, rel=1e-5)
        assert my_norms == pytest.approx(norms, rel=1e-5)
        for path, bias in my_biases.items():
            torch.testing.assert_close(bias, biases[path])


def router(loss=0.0, rate=0.0):
    experts = msgspec.structs.replace(MOE.experts, choice_bias=rate > 0)
    found = BalancedRouter(ModelBuild("cpu"), MOE, experts, loss, rate, None)
    nn.init.normal_(found.weight, std=0.1)
    if found.bias_E is not None:
        nn.init.zeros_(found.bias_E)
    return found


def test_the_balance_loss_has_its_textbook_gradient():
    layer = router(loss=0.7)
    x_TD = torch.randn(20, MOE.hidden)
    weights_TN, chosen_TN = layer(x_TD)
    (0.0 * weights_TN).sum().backward()
    mine = layer.weight.grad.clone()
    layer.weight.grad = None
    scores_TE = F.linear(x_TD, layer.weight).softmax(-1)
    busy_E = torch.bincount(chosen_TN.flatten(), minlength=6) / chosen_TN.numel()
    (0.7 * 6 * (busy_E * scores_TE.mean(0)).sum()).backward()
    torch.testing.assert_close(mine, layer.weight.grad)


def test_a_scaled_loss_scales_the_balance_as_well():
    """float16 multiplies the loss so that small gradients survive; what enters by its gradient has to follow."""
    parallel = parallelize(MOE, Mesh.alone(), seed=SEED, balance=Balance(loss=0.5))
    every = batches(MOE, 0, 2)
    loss, valid, scale = Objective(MOE), torch.tensor(24.0), torch.tensor(2.0**16)
    parallel.forward_backward(every, loss, valid)
    plain = {name: gradient.clone() for name, gradient in parallel.gradients().items()}
    parallel.zero_grad()
    parallel.forward_backward(every, loss, valid / scale, scale)
    for name, gradient in parallel.gradients().items():
        torch.testing.assert_close(gradient / scale, plain[name], msg=name)


def test_the_bias_evens_out_the_load():
    layer = router(rate=0.004)
    x_TD = torch.randn(200, MOE.hidden) + 1.0

    def spread():
        counts_E = torch.bincount(layer(x_TD)[1].flatten(), minlength=6).float()
        return float(counts_E.max() / counts_E.mean())

    before = spread()
    layer.load_E.zero_()
    for _ in range(100):
        layer(x_TD)
        layer.steer(None)
    assert spread() < 1.25 < before


def test_the_bias_chooses_but_never_weighs():
    layer = router(rate=0.1)
    x_TD = torch.randn(9, MOE.hidden)
    layer.bias_E.data[2] = 5.0
    weights_TN, chosen_TN = layer(x_TD)
    assert (chosen_TN == 2).any(-1).all()
    scores_TE = F.linear(x_TD, layer.weight).softmax(-1).gather(1, chosen_TN)
    torch.testing.assert_close(weights_TN, scores_TE / scores_TE.sum(-1, keepdim=True))


def after_muon(parallel, spec, missing):
    """Two steps; the second without the gradient of one matrix."""
    optimizer = make_optimizer(
        parallel.parameters(),
        Optim(kind="muon", lr=0.02),
        False,
        0,
        parallel.named_state,
        parallel.matrices(),
    )
    every = batches(spec, 0, 4)
    each = len(every) // parallel.data_ranks
    mine = every[parallel.data_rank * each :][:each]
    for number in (1, 2):
        parallel.forward_backward(mine, Objective(spec), torch.tensor(40.0))
        gradients = parallel.gradients()
        if number == 2:
            gradients.pop(missing, None)
        optimizer.update(gradients, number, 0.02, torch.tensor(1.0))
        parallel.zero_grad()
    return {n: (p.tensor.clone(), p.offsets) for n, p in parallel.named_state().items()}


def muon_on_ranks(rank, world, spec, missing):
    forms = [(Layout(dp=2, tp=2), Strategy(zero=1)), (Layout(dp=2, fsdp=2), Strategy())]
    return [
        after_muon(parallelize(spec, Mesh.join(layout), options, seed=SEED), spec, missing)
        for layout, options in forms
    ]


@pytest.mark.parametrize("missing", ["", "layers.0.attention.out.weight"])
def test_muon_puts_matrices_together_that_ranks_have_parts_of(missing):
    spec = spec_of("tiny-qwen3", layers=1)
    model = parallelize(spec, Mesh.alone(), seed=SEED)
    assert not missing or missing in model.parameters()
    whole = after_muon(model, spec, missing)
    for forms in run_ranks(4, muon_on_ranks, spec, missing):
        for state in forms:
            for name, (part, offsets) in state.items():
                at = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
                torch.testing.assert_close(part, whole[name][0][at], rtol=0, atol=1e-5)


class HostCopies(TorchFunctionMode):
    """Counts what makes the host wait for the device: numbers that are read, and results of unknown length."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        reads = name in ("tolist", "item", "cpu", "__bool__", "__int__", "nonzero")
        if reads or (name == "repeat_interleave" and "output_size" not in (kwargs or {})):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def host_copies(rank, world):
    spec = spec_of("tiny-moe", layers=1)
    parallel = parallelize(spec, Mesh.join(Layout(dp=world, ep=world)), seed=SEED)
    (layer,) = [m for m in parallel.stages[0].modules() if isinstance(m, SpreadExperts)]
    sorted_MD = torch.randn(12, spec.hidden, requires_grad=True)
    ends_E = torch.tensor([2, 2, 5, 6, 11, 12], dtype=torch.int32)
    layer.visit = lambda x_MD, ends_E: x_MD * 2  # its own products are not the subject
    with HostCopies() as copies:
        out_MD = layer._visit_ranks(sorted_MD, ends_E)
        out_MD.sum().backward()
    assert torch.equal(out_MD, 2 * sorted_MD)
    assert torch.equal(sorted_MD.grad, torch.full_like(sorted_MD, 2))
    return copies.seen


def test_the_host_reads_the_counts_of_expert_rows_once():
    assert run_ranks(2, host_copies) == [["tolist"]] * 2


def ring_events(rank, world):
    """When gradients of keys and values leave, when they are waited for, and the blocks between."""
    events, exchange = [], Ring.exchange

    def logged(ring, tensors):
        number = sum(kind == "start" for kind, _ in events)
        events.append(("start", number))
        wait = exchange(ring, tensors)

        def waited():
            events.append(("wait", number))
            return wait()

        return waited

    def block(*arguments):
        events.append(("block", None))
        return backward_block(*arguments)

    Ring.exchange, context.backward_block = logged, block
    ring = Ring(Mesh.join(Layout(cp=world)).group("cp"), [5, 11], "cpu")
    q, k, v = (torch.randn(8, 2, 4, requires_grad=True) for _ in range(3))
    ring(q, k, v, AttentionRule(layer=0, scale=0.5)).sum().backward()
    return events[events.index(("block", None)) :]


def test_gradients_of_keys_travel_while_the_next_blocks_are_computed():
    for events in run_ranks(2, ring_events):
        # Of the backward: 0 and 1 were keys and values, forward and backward; 2 and 3 are their gradients.
        between = events[events.index(("start", 2)) : events.index(("wait", 2))]
        assert ("block", None) in between
        assert events[-1] == ("wait", 3)


def most_kept(rank, world, microbatches):
    """How many sent tensors a rank keeps at most during a step."""
    kept, start = [0], _Step.start

    def counted(step, message):
        start(step, message)
        kept.append(len(step.leaving))

    _Step.start = counted
    spec = spec_of("tiny-qwen3", layers=2)
    parallel = parallelize(spec, Mesh.join(Layout(pp=world)), Strategy(order="1f1b"), seed=SEED)
    parallel.forward_backward(batches(spec, 0, microbatches), Objective(spec), torch.tensor(40.0))
    return max(kept)


def test_sent_activations_go_during_the_step():
    """In 1F1B a rank keeps as few as the pipeline is deep, not one for each microbatch."""
    assert max(run_ranks(2, most_kept, 12)) <= 2


def gradients_with_fsdp(rank, world):
    """Of three microbatches together, and of each alone; and what was there after each backward."""
    spec = spec_of("tiny-qwen3", layers=1)
    loss, every, valid = Objective(spec), batches(spec, 0, 3), torch.tensor(30.0)
    found = {}
    for whole in (False, True):
        options = Strategy(whole_gradients=whole)
        parallel = parallelize(
            spec, Mesh.join(Layout(fsdp=2)), options, dtype=torch.float16, seed=SEED
        )
        (sync,) = parallel.syncs
        held = []
        sync.after_backward = lambda sync=sync, held=held: held.append(len(sync.gradients()))
        for name, some in [("all", every), *((n, [batch]) for n, batch in enumerate(every))]:
            parallel.forward_backward(some, loss, valid)
            found[name, whole] = {n: g.clone() for n, g in parallel.gradients().items()}
            parallel.zero_grad()
        found["held", whole] = held[:3]
    return found


def test_fsdp_keeps_only_rows_of_gradients_and_adds_them_in_float32():
    for found in run_ranks(2, gradients_with_fsdp):
        together, names = found["all", False], len(found["all", False])
        assert found["held", False] == [names] * 3
        assert found["held", True] == [0, 0, names]  # whole, somewhere inside torch
        for name, gradient in together.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, sum(found[n, False][name].float() for n in range(3)))
            rounded = found["all", True][name].float()
            torch.testing.assert_close(gradient, rounded, rtol=2e-2, atol=1e-3)


def test_initial_weights_do_not_depend_on_the_layout():
    spec = spec_of("tiny-qwen3", layers=4)
    expected = parallelize(spec, Mesh.alone(), seed=SEED).named_state()
    for layout, options in [
        (Layout(pp=2, tp=2), Strategy(order="zbv")),
        (Layout(fsdp=4), Strategy()),
    ]:
        for state in run_ranks(4, initial, spec, layout, options):
            for name, (part, offsets) in state.items():
                at = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
                assert torch.equal(part, expected[name].tensor[at]), name


def initial(rank, world, spec, layout, options):
    state = parallelize(spec, Mesh.join(layout), options, seed=SEED).named_state()
    return {name: (piece.tensor.clone(), piece.offsets) for name, piece in state.items()}
