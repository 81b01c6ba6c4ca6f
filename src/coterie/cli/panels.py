"""The settings in the help of a command, in panels: what most people need first, then one question after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand

OWN = "Options"  # those of the command itself
PANELS = {
    title: tuple(names.split())
    for title, names in {
        "To begin with": "method data silos target model rounds lr seed",
        "Data": "setting data_dir partition clients split validation test holdout split_seed scaling image_size "
        "augment drop_duplicates",
        "Sites' own files": "schema columns missing site_column group drop",
        "What is predicted": "task regression horizons levels loss class_weights",
        "Models": "models pretrained adapter head",
        "Training at a client": "local_epochs local_steps batch_size optimizer momentum beta1 beta2 eps weight_decay "
        "schedule clip_gradient clip_gradient_value",
        "Clients and server": "fraction clients_per_round sampler clients_heard topology robust server_optimizer "
        "early_stop",
        "Differential privacy": "privacy epsilon delta noise clip clip_features clip_loss",
        "Evaluation": "evaluate_every metric select average reference references",
        "What clients take home": "take_home take_home_errors take_home_folds calibrate threshold",
        "Reports and records": "report sections track callbacks checkpoint_every",
        "How it is computed": "engine compile workers device bf16 memory debug",
    }.items()
}


class Listed(TyperCommand):
    """A command whose help lists its options."""

    panels: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each title that has options, in the order of `panels`."""
        found: dict[str, list[Any]] = {"Arguments": [], OWN: []}
        settings: dict[str, Any] = {}
        named = {name for names in self.panels.values() for name in names}
        for param in self.get_params(ctx):
            record: Any = param.get_help_record(ctx)
            if record is not None and param.name in named:
                settings[param.name] = record
            elif record is not None:
                title = "Arguments" if param.param_type_name == "argument" else OWN
                found[title].append(
                    (record[0], record[1].replace("\\[", "["))
                )  # escaped by Typer for Rich, which is off
        found |= {title: [settings[n] for n in names if n in settings] for title, names in self.panels.items()}
        for title, records in found.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class InPanels(Listed):
    """A command with all settings of a run, which its help has in panels."""

    panels = PANELS
