"""What a run needs and can be refused for at the door: in seconds, before any rank, engine or cluster starts."""

from __future__ import annotations

from or1_megatron.config import Config
from or1_megatron.config_file import check_resume, load_config
from or1_megatron.data.problems import load_problems
from or1_megatron.data.rows import DataError
from or1_megatron.handoff.choice import check_choice, cuda_here
from or1_megatron.layouts import choose_layers
from or1_megatron.runtime.run_folder import CheckpointKeeper, RunFolder
from or1_megatron.types import Problem
from or1_megatron.verify.registry import build_verifiers, known_abilities
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.files import check_weight_files


def check_inputs(config: Config) -> None:
    """Check the run folder, the model's weight files and every row of the data; the gold answers are left to the run.

    Raises:
        RunFolderBusy, ConfigError: another trainer uses the folder, or the run in it had another configuration.
        LayersUnavailable: Transformer Engine's layers are asked for where they cannot run.
        ModelError, DataError, SandboxUnavailable, VerifierBroken: of the model, the problems, or the means to verify
            them.
        OSError: the folder cannot be made.
    """
    folder = RunFolder(config.run.dir)
    folder.create()
    with folder.lock(wait_s=2.0):
        check_resumable(config, folder)
    choose_layers(config.parallel, config.model.dtype)
    check_choice(config, cuda_here())
    for model in (config.model.hf, config.algorithm.kl.reference):
        if model is not None:
            check_weight_files(model, read_hf_config(model))
    train, held_out = read_problems(config)
    for verifier in build_verifiers(
        config.verify, abilities_of([*train, *held_out], known_abilities(config.verify))
    ).values():
        verifier.close()


def check_resumable(config: Config, folder: RunFolder) -> None:
    """Raise ConfigError when the folder holds checkpoints of a run whose configuration was another."""
    if checkpoint_keeper(config, folder).newest() is not None and folder.config.is_file():
        check_resume(load_config(folder.config), config)


def checkpoint_keeper(config: Config, folder: RunFolder) -> CheckpointKeeper:
    keep = config.checkpoint
    return CheckpointKeeper(folder.checkpoints, keep.keep_last, keep.keep_best, keep.keep_every_steps)


def read_problems(config: Config) -> tuple[list[list[Problem]], list[list[Problem]]]:
    """(training problems of each source, held-out problems of each). Raises DataError."""
    return (
        [load_problems(source.path) for source in config.data.train],
        [load_problems(source.path) for source in config.evaluate.data],
    )


def abilities_of(sets: list[list[Problem]], known: frozenset[str]) -> frozenset[str]:
    """Raises DataError naming the first row whose ability nothing can verify: is not ``known``."""
    for problems in sets:
        for problem in problems:
            if problem.ability not in known:
                raise DataError(
                    f"{problem.origin}: field 'ability': found '{problem.ability}', which has no verifier; "
                    f"expected one of: {', '.join(sorted(known))}"
                )
    return frozenset(problem.ability for problems in sets for problem in problems)
