"""quantmint plan RECIPE"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option, store_option, vllm_option


@click.command(name="plan")
@click.argument("recipe")
@click.option(
    "--config",
    "config_folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with the model's config.json, to plan without its weights and without a network.",
)
@click.option("--probe", is_flag=True, help="Time this machine for some seconds first; the store remembers.")
@vllm_option
@store_option
@json_option
def command(
    recipe: str, config_folder: Path | None, probe: bool, vllm: str | None, store_path: Path, as_json: bool
) -> int:
    """Show the stages of RECIPE, which of them are cached, and what it takes: time, memory, disk.

    Nothing is made. Ends with 2 where the disk is too small or the recipe asks for the impossible.
    """
    from eval.gate.reach import reach
    from pipeline.cost.forecast import forecast
    from pipeline.planning import build_plan
    from pipeline.prediction import disk_needed, predict, require_disk
    from pipeline.preflight import missing_stages, model_for
    from pipeline.recipe.proof_checks import as_asked
    from pipeline.runner import foreseen
    from pipeline.serving.hardware import cautions
    from pipeline.session import open_setting
    from pipeline.stages.gate import policy_of
    from pipeline.stages.source import config_folder as fetched
    from pipeline.store.disk import free_bytes
    from pipeline.store.tree import Store

    setting = open_setting(recipe, store=Store(store_path), vllm=vllm, config=config_folder)
    plan = foreseen(build_plan(setting), setting)
    missing = missing_stages(plan, setting)
    model = model_for(setting, config_folder or fetched(setting.source))
    prediction = predict(*model, setting.recipe)
    costs = forecast(*model, setting.recipe, setting.device, store_path, probing=probe)
    download, copied = setting.source.folder is None, setting.recipe.publish.folder is not None
    needed = disk_needed(prediction, missing, download=download, copied=copied)
    where = store_path.absolute()
    free = free_bytes(where)
    quantization, target = setting.recipe.quantization, setting.recipe.target
    notes = cautions(target.hardware, quantization.scheme, quantization.kv_cache, quantization.format)
    evaluation = setting.recipe.evaluation
    told = reach(as_asked(setting.suite, evaluation, setting.recipe.gate), policy_of(setting), evaluation.looks)
    if as_json:
        require_disk(needed, free, str(where))  # standard output holds one object: the plan, or why there is none
        emit(
            {
                "recipe": setting.recipe.name,
                "source": setting.source.to_json(),
                "stages": [
                    {"stage": p.key, "fingerprint": p.fingerprint, "cached": p.key not in missing} for p in plan
                ],
                "predicted": prediction.to_json(),
                "costs": costs.to_json(),
                "disk": {"needed": needed, "free": free, "where": str(where)},
                "gate": told.to_json(),
                "cautions": list(notes),
            }
        )
    else:
        from pipeline.commands.tables import print_plan

        print_plan(setting, plan, missing, prediction, costs, needed, free, told, notes)
    require_disk(needed, free, str(where))
    return 0
