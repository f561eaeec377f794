"""Hooks on real optimizers: whatever way they step, the arena has the values of before."""

import copy

import pytest
import torch
from staging_bench import Bench
from torch import nn

from safehold.errors import ConfigurationError
from safehold.host.device_torch import TorchDevice
from safehold.pipeline.staging import hook_optimizers


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


def make_optimizers(model, kind):
    parameters = list(model.parameters())
    if kind == "several":
        return [torch.optim.AdamW(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1, momentum=0.9)]
    if kind == "lbfgs":
        return [torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)]
    return [
        torch.optim.Adam(
            parameters,
            lr=0.1,
            **{"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[kind],
        )
    ]


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(16, 64, generator=generator)).square().mean()


def live_leaves(model, optimizers):
    leaves = [(f"model.{name}", parameter.detach(), True) for name, parameter in model.named_parameters()]
    for number, optimizer in enumerate(optimizers):
        for at, state in enumerate(optimizer.state.values()):
            leaves += [
                (f"optimizer{number}.{at}.{name}", v, True) for name, v in state.items() if isinstance(v, torch.Tensor)
            ]
    return leaves


class Saved:
    """A save staged beside training, and the values that it must have."""

    def __init__(self, model, optimizers):
        leaves = live_leaves(model, optimizers)
        self.bench = Bench(TorchDevice(), [(n, t, t.contiguous().numpy().tobytes(), h) for n, t, h in leaves])
        self.tensors = [tensor for _, tensor, _ in leaves]
        self.before = [tensor.clone() for tensor in self.tensors]
        self.ticket = self.bench.stage(overlap=True)

    def check(self):
        self.ticket.finish(20)
        self.bench.assert_exact()
        assert any(not torch.equal(a, b) for a, b in zip(self.tensors, self.before, strict=True)), "nothing was stepped"
        self.bench.close()


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused", "several", "lbfgs"])
def test_steps_of_all_kinds(kind):
    model = make_model()
    optimizers = make_optimizers(model, kind)
    saved = None
    calls = []

    def before_step():
        calls.append(1)
        if saved:
            saved.ticket.wait_before_step()

    unhook = hook_optimizers([(f"o{n}", o) for n, o in enumerate(optimizers)], before_step)
    for step in range(4):
        if step == 2:
            saved = Saved(model, optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in optimizers:
            if kind == "lbfgs":
                optimizer.step(lambda step=step: loss_of(model, step))
            else:
                optimizer.step()
    saved.check()
    assert len(calls) == 4 * len(optimizers)
    unhook()
    unhook()
    optimizers[0].step(lambda: loss_of(model, 9))
    assert len(calls) == 4 * len(optimizers)


def test_accumulated_gradients_and_a_scheduler():
    model = make_model()
    (optimizer,) = make_optimizers(model, "plain")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step on the instance
    saved = None
    unhook = hook_optimizers([("o", optimizer)], lambda: saved and saved.ticket.wait_before_step())
    loss_of(model, 0).backward()
    optimizer.step()
    scheduler.step()
    saved = Saved(model, [optimizer])
    for seed in range(5):
        loss_of(model, seed).backward()
    optimizer.step()
    scheduler.step()
    saved.check()
    unhook()


def test_optimizers_inside_backward():
    model = make_model()
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}
    saved = None
    unhook = hook_optimizers(
        [(f"o{n}", o) for n, o in enumerate(optimizers.values())], lambda: saved and saved.ticket.wait_before_step()
    )

    def step_now(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_now)
    loss_of(model, 0).backward()
    saved = Saved(model, optimizers.values())
    loss_of(model, 1).backward()
    saved.check()
    unhook()


def test_hooks_do_not_change_results():
    ours, theirs = make_model(), make_model()
    optimizers = [make_optimizers(model, "foreach")[0] for model in (ours, theirs)]
    unhook = hook_optimizers([("o", optimizers[0])], lambda: None)
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    unhook()


def test_those_that_cannot_be_hooked_are_named_and_none_is_hooked():
    class Homemade:
        def step(self):
            pass

    class Pretender(Homemade):
        def register_step_pre_hook(self, hook):
            return copy

    (good,) = make_optimizers(make_model(), "plain")
    called = []
    with pytest.raises(ConfigurationError, match=r"second \(Homemade\), third \(Pretender\)"):
        hook_optimizers([("first", good), ("second", Homemade()), ("third", Pretender())], lambda: called.append(1))
    good.step()
    assert called == []
