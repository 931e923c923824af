"""Every key is explained, with its unit; docs/config.md is what the schema generates.

Not proven here: that a text is true. The defaults are held against the report's figures in examples/test_recipes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.config.base import ConfigError
from or1_megatron.config.explain import HEADING, explain
from or1_megatron.config.keys import keys_of
from or1_megatron.config.schema import Config

ROOT = Path(__file__).parents[2]


def entries() -> dict[str, str]:
    """Each key's text, by its name as it is printed."""
    return {match[1]: match[0] for match in re.finditer(r"- `([^`]+)`:.*(?:\n  - .*)+", explain())}


def test_the_document_is_fresh() -> None:
    document = (ROOT / "docs/config.md").read_text()
    assert document == f"{HEADING}\n{explain()}\n", "python -m or1_megatron.config.explain > docs/config.md"


def test_every_key_has_a_text_and_every_number_a_unit() -> None:
    found = entries()
    plain = [key for key in keys_of(Config) if key.section is None]
    assert set(found) == {key.name.replace("*", "N") for key in plain}
    for name, text in found.items():
        assert re.match(rf"- `{re.escape(name)}`: \S.{{4,}}", text), f"{name} has no docstring"
        if re.search(r"\n  - (list of |mapping of names to )?(integer|number)", text):
            assert "; unit: " in text, f"{name}: its docstring needs 'Unit: ...'"
    for section in {key.owner for key in plain}:
        assert section.__doc__, section


def test_sources_are_sections_of_the_recipe() -> None:
    sections = set(re.findall(r"^## (\d)\.", (ROOT / "docs/recipe.md").read_text(), re.MULTILINE))
    cited = {
        n for group in re.findall(r"recipe\.md, sections? ([\d, and]+)", explain()) for n in re.findall(r"\d", group)
    }
    assert cited <= sections and len(cited) >= 5


def test_one_key() -> None:
    """Type, bounds, unit, default, what may change, and the source."""
    assert explain("algorithm.entropy.target").splitlines()[4:] == [
        "- `algorithm.entropy.target`: Entropy above which the bonus is off.",
        "  - number 0 or more; unit: nats per token; default: 0.2",
        "  - may change: in the next stage",
        "  - recipe: 0.2 in the paper (section 3.2.5) and every released model.",
    ]
    found = entries()
    assert "integer above 0; unit: bytes; default: 536870912 (512 MiB)" in found["handoff.bucket_bytes"]
    assert (
        "integer 0 or more; unit: rollout steps; default: 0\n  - may change: in the next stage"
        in (
            found["rollout.max_staleness"]  # an exception to rollout.*
        )
    )
    assert "may change: on resume and in the next stage" in found["stages.N.steps"]
    assert "path; required\n  - may change: never" in found["model.hf"]
    assert "list of integer above 0; unit: layers; default: unset" in found["parallel.layers_per_stage"]
    assert "recipe" not in found["optimizer.eps"]  # the report does not say


@pytest.mark.parametrize(
    ("wanted", "count"),
    [("stages.0.group_size", 1), ("stages.*.group_size", 1), ("group_size", 1), ("data.train.path", 1), ("lr", 1),
     ("optimizer", 8), ("max_response_tokens", 4)],
)  # fmt: skip
def test_names_that_are_understood(wanted: str, count: int) -> None:
    """With an index, a star or neither; the last parts of a name; a section."""
    assert len(re.findall(r"^- `", explain(wanted), re.MULTILINE)) == count


def test_unknown_keys() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate: unknown key; did you mean .*optimizer\.lr"):
        explain("optimizer.learning_rate")
    with pytest.raises(ConfigError, match=r"clip_hihg: unknown key; did you mean clip_high"):
        explain("clip_hihg")


def test_the_command() -> None:
    def invoke(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["config", *arguments])
        return result.exit_code, result.stdout, result.stderr

    assert invoke("--explain", "optimizer.lr") == (0, explain("optimizer.lr") + "\n", "")
    assert invoke("--explain") == (0, explain() + "\n", "")
    code, _, said = invoke("--explain", "optimizer.lrr")
    assert code == 2 and said.startswith("or1: error: optimizer.lrr: unknown key; did you mean optimizer.lr")
    assert invoke()[0] == 2 and "only --explain works without it" in invoke()[2]
