"""The parts of examples/ and benchmarks/ that decide something: the demo's data loader, and what the figures say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    name = f"_examined_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


text = load("examples/text.py")
llama = load("examples/llama.py")
figures = load("benchmarks/figures.py")


def loader(rank: int = 0, world_size: int = 1, batch_size: int = 2) -> Any:
    path = ROOT / "examples/data/kjv.txt"
    return text.ShuffledText(path, length=64, batch_size=batch_size, rank=rank, world_size=world_size, seed=3)


def take(source: Any, number: int) -> torch.Tensor:
    return torch.cat([inputs for inputs, _ in (pair for pair, _ in zip(iter(source), range(number), strict=False))])


def test_the_text_is_about_a_megabyte_of_plain_english() -> None:
    data = (ROOT / "examples/data/kjv.txt").read_bytes()
    assert 900_000 < len(data) < 1_200_000
    assert data.isascii()
    assert data.startswith(b"Genesis 1\n\nIn the beginning")


def test_a_loader_goes_on_where_another_was() -> None:
    whole, first, second = loader(), loader(), loader()
    expected = take(whole, 6)
    head = [batch[0] for batch, _ in zip(iter(first), range(2), strict=False)]
    second.load_state_dict(first.state_dict() | {"next": 4})
    assert torch.equal(torch.cat([*head, take(second, 4)]), expected)


def test_ranks_share_the_sequences_of_one() -> None:
    alone = take(loader(batch_size=4), 3)
    apart = [take(loader(rank, 2), 3) for rank in range(2)]
    assert torch.equal(
        torch.cat([apart[rank][2 * step : 2 * step + 2] for step in range(3) for rank in range(2)]), alone
    )


def test_every_epoch_has_another_order() -> None:
    source = loader(batch_size=1)
    length = len(source._inputs)
    orders = [[source._sequence(number) for number in range(first, first + 50)] for first in (0, length)]
    assert orders[0] != orders[1]
    assert sorted(source._sequence(number) for number in range(length)) == list(range(length))


def test_targets_are_the_next_bytes() -> None:
    inputs, targets = next(iter(loader()))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_model_is_causal_and_has_the_size_it_says() -> None:
    torch.manual_seed(0)
    model = llama.Llama(llama.LlamaConfig()).eval()
    model.init_weights()
    assert 20e6 < sum(parameter.numel() for parameter in model.parameters()) < 30e6
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, -1] += 1
    with torch.no_grad():
        before, after = model(tokens), model(changed % 256)
    assert torch.equal(before[0, :-1], after[0, :-1])
    assert not torch.equal(before[0, -1], after[0, -1])


def measured(**changes: Any) -> Any:
    save = {"kind": "save", "variant": "save", "window_s": 2.0, "num_files": 5}
    entries = [
        {"kind": "limits", "variant": "limits", "copy_s": 0.2, "write_s": 1.9, "read_s": 1.8},
        *({**save, "first": first, "pause_s": pause} for first, pause in ((True, 0.3), (False, 0.21), (False, 0.23))),
        {"kind": "save", "variant": "dcp-thread", "first": False, "pause_s": 0.3, "window_s": 3.0},
        {"kind": "restore", "variant": "restore", "source": "flash", "seconds": 2.0, "equal": True, **changes},
    ]
    return figures.Measurements(entries)


def test_figures_are_ratios_to_the_limits_of_the_same_run() -> None:
    rows = {row.name: row for row in figures.figures(measured(), num_ranks=2)}
    later, peer = rows["pause, later saves"], rows["pause, later saves, beside the best peer"]
    assert later.value == pytest.approx(0.22)
    assert later.ratio == pytest.approx(1.1)
    assert later.is_kept is True
    assert peer.ratio == pytest.approx(0.22 / 0.3)
    assert rows["pause, first save after prepare"].is_kept is False
    assert rows["window, trainers idle"].ratio == pytest.approx(0.95)
    assert rows["restore from flash, cold"].is_kept is True
    assert rows["files of a checkpoint"].is_kept is True


def test_a_wrong_load_is_named() -> None:
    assert measured().wrong_loads() == []
    assert measured(equal=False).wrong_loads() == ["restore"]


def test_tables_are_markdown() -> None:
    rows = figures.figures(measured(), num_ranks=2)
    table = figures.figures_table(rows).splitlines()
    assert len(table) == len(rows) + 2
    assert {line.count("|") for line in table} == {8}
    assert "| safehold |" in figures.candidates_table(measured(), {"save": "safehold"})
