"""How the hardware that a reader may have serves the checkpoint: the launch plan's own commands, for the card.

Pure over the checkpoint's facts and the recipe: neither this machine's cores nor its folders are in a command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from eval.workloads import Workload
from pipeline.errors import UserError
from pipeline.publish.card.facts import Launch
from pipeline.recipe.schema import Recipe
from pipeline.serving import hardware
from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.planning.planner import layout_words, plan_serving
from pipeline.serving.planning.processes import processes
from pipeline.serving.planning.target import Target, parse_target, profile
from pipeline.serving.render.invocation import command, script, servers

SHOWN: Final = ("mi300x", "mi355x")
"""What every card has a command for; the recipe's own target comes first."""
_SIZES: Final = (1, 2, 4, 8)
"""Accelerators that are tried where the recipe is for other hardware: the fewest that hold the model."""
_THREADS: Final = "OMP_NUM_THREADS"


def launches(recipe: Recipe, workload: Workload, facts: ModelFacts, model: str, *, vllm: str) -> tuple[Launch, ...]:
    """A launch for the recipe's target and for each of `SHOWN`.

    ``facts`` are the checkpoint's, ``model`` is what a command calls it, ``vllm`` the version that is planned for.
    """
    names = dict.fromkeys((recipe.target.hardware, *SHOWN))
    return tuple(_launch(name, recipe, workload, facts, model, vllm) for name in names)


def _launch(name: str, recipe: Recipe, workload: Workload, facts: ModelFacts, model: str, vllm: str) -> Launch:
    title, refused = hardware.hardware(name).title, None
    for target in _targets(name, recipe):
        try:
            plan = _plan(target, recipe, workload, facts, model, vllm)
        except UserError as error:
            refused = error.message
            continue
        running = processes(plan, port=8000)
        return Launch(
            title=title,
            target=str(target),
            command=_command(plan, running, cpu=target.accelerator.kind == "cpu"),
            layout=layout_words(plan.layout),
            servers=len(servers(running)),
            vllm=plan.vllm_version,
            image=plan.image,
            cautions=(*plan.warnings, *_left_out(recipe)),
        )
    return Launch(title=title, target=name, vllm=vllm, refusal=refused)


def _targets(name: str, recipe: Recipe) -> Iterator[Target]:
    """The recipe's accelerators, else the fewest that will do."""
    kind = hardware.hardware(name).kind
    if recipe.target.hardware == name or (kind != "cpu" and recipe.target.gpus > 1):
        yield parse_target(f"{name}:{recipe.target.gpus}")
        return
    yield from (parse_target(f"{name}:{gpus}") for gpus in _SIZES)


def _plan(target: Target, recipe: Recipe, workload: Workload, facts: ModelFacts, model: str, vllm: str) -> LaunchPlan:
    own = recipe.target.hardware == target.hardware
    speculative = recipe.serve.speculative
    return plan_serving(
        model,
        facts,
        target=target,
        profile=profile(
            recipe.serve.profile or workload.profile,
            concurrency=max(recipe.evaluation.concurrency, workload.in_flight),
            max_model_len=recipe.target.max_model_len,
        ),
        vllm_version=vllm,
        overrides=recipe.serve.overrides if own else {},
        speculative=None if speculative is None or speculative.model is not None else speculative,
        served_model_name=model.rpartition("/")[2],
        trust_remote_code=recipe.trust_remote_code,
        cpu_threads=1,
        packed=recipe.serve.pack if own else 1,
        arguments=recipe.serve.arguments,
    )


def _left_out(recipe: Recipe) -> Iterator[str]:
    """What the recipe's own launch has, and a reader does not."""
    if recipe.serve.tunableop is not None:
        yield "the recipe serves with matrix kernels that TunableOp found, whose file is not here"
    if recipe.serve.speculative is not None and recipe.serve.speculative.model is not None:
        yield "the recipe serves with speculative decoding by another model, which is not here"


def _command(plan: LaunchPlan, running: Sequence[Process], *, cpu: bool) -> str:
    """The variables and one server's command; the whole script where a server spans machines.

    A CPU server's threads are those of the reader's machine.
    """
    if plan.layout.nodes > 1:
        return script(plan, running)
    lines = [
        f"export {name}=" + ('"$(nproc)"' if cpu and name == _THREADS else shlex.quote(value))
        for name, value in plan.env.items()
    ]
    return "\n".join([*lines, command(servers(running)[0])])
