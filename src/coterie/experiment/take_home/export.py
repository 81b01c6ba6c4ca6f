"""Export a client's model to a file that other programs load without Coterie.

    torch         a .pt2 archive of `torch.export`: the graph as JSON and the weights as raw bytes. TorchScript and
                  `torch.save` would put code or pickles in the file, which whoever opens it has to trust; here no part
                  is a pickle (the example inputs, which would be one, are left out). torch.export.load(FILE).module()
    onnx          by `torch.onnx`, needs coterie[onnx]: input x, output logits or probabilities
    safetensors   the weights, under the names that the network has, and FILE.json, which says how to rebuild it; of an
                  average of a federated and a local model, both, as federated.NAME and local.NAME

All but safetensors hold the whole prediction: of a mixture, the collaborators' models and their weights. The first axis
(the rows) has any length. Outputs are logits, as evaluation uses; with `probabilities`, their softmax.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from coterie.core.errors import ConfigError, CoterieError
from coterie.core.targets import Target
from coterie.core.tree import Params
from coterie.evaluation.adoption import LOCAL
from coterie.experiment.building import Model
from coterie.experiment.take_home.adopt import LOCAL_FILE
from coterie.experiment.take_home.load import blank_inputs, find_client, load, needs_local, target_of
from coterie.models.adapters import find_adapter
from coterie.storage import files
from coterie.storage.run_folder import safe_name

Format = Literal["torch", "onnx", "safetensors"]
ENDINGS = {"torch": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}


class Probabilities(nn.Module):
    """Wrap a model so that its outputs are probabilities."""

    def __init__(self, target: Target, model: nn.Module) -> None:
        super().__init__()
        self.target, self.model = target, model

    def forward(self, x: Tensor) -> Tensor:
        return self.target.predictions(self.model(x))


def export(
    run: str | Path,
    client: str | int,
    format: Format = "torch",
    out: str | Path | None = None,
    *,
    probabilities: bool = False,
    model: Model | None = None,
) -> Path:
    """Export a client's model.

    Args:
        run: the run folder.
        client: a client's name, or its number from 1.
        format: "torch", "onnx" or "safetensors".
        out: a file or folder; by default the client's name, with the format's ending.
        probabilities: output probabilities instead of logits.
        model: the same model again, if the run's was given in Python.

    Returns:
        The file that was written.

    Raises:
        ConfigError: the format is unknown, or has no probabilities.
        CoterieError: there is no such client, the model cannot be traced, or ONNX is not installed.

    Examples:
        `first` is a run folder. The file holds the whole prediction and needs no Coterie:

        >>> import coterie, torch
        >>> path = coterie.export("first", "north", "torch", "north.pt2")
        >>> torch.export.load(path).module()(torch.zeros(3, 20)).shape
        torch.Size([3, 2])
    """
    if format not in get_args(Format):
        raise ConfigError([f"format = '{format}': choose from {', '.join(get_args(Format))}"])
    folder, about = find_client(run, client)
    path = Path(out) if out is not None else Path(safe_name(about["client"]) + ENDINGS[format])
    if path.is_dir():
        path = path / (safe_name(about["client"]) + ENDINGS[format])
    target = target_of(about)
    if probabilities and (format == "safetensors" or not target.has_probabilities):
        why = "safetensors holds weights only" if format == "safetensors" else f"{target.words} has none"
        raise ConfigError([f"probabilities: {why}"])
    about = {**about, "output": "probabilities" if probabilities else about_output(about)}
    if format == "safetensors":
        weights = _weights(folder, about)
        if about.get("adapter"):
            weights = find_adapter(about["adapter"]).merged(weights)
            about = {**about, "adapter": None, "merged": about["adapter"]}
        files.write_tensors(path, weights, {"format": "pt"})
        files.write_json(path.with_name(path.name + ".json"), {**about, "weights": path.name})
        return path
    module = load(run, about["client"], model=model)
    module = Probabilities(target, module).eval() if probabilities else module
    content = (_torch if format == "torch" else _onnx)(module, about)
    files.write(path, lambda temporary: _save(temporary, content))
    return path


def _weights(folder: Path, about: dict[str, Any]) -> Params:
    """Return the weights of the model that the client takes home; of an average, those of both, by prefix."""
    federated = files.read_tensors(folder / "model.safetensors")
    if not needs_local(about):
        return federated
    local = files.read_tensors(folder / LOCAL_FILE)
    if about["take_home"]["kept"] == LOCAL:
        return local
    both = {"federated": federated, "local": local}
    return {f"{which}.{name}": value for which, flat in both.items() for name, value in flat.items()}


def about_output(about: dict[str, Any]) -> str:
    """Return what a model's outputs are called."""
    return "values" if about["kind"] == "regression" else "logits"


def _torch(module: nn.Module, about: dict[str, Any]) -> bytes:
    program = _in_words(
        lambda: torch.export.export(module, (_example(about),), dynamic_shapes=(_any_rows(),), strict=False)
    )
    program.example_inputs = None
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"model.json": json.dumps(about)})
    return buffer.getvalue()


def _onnx(module: nn.Module, about: dict[str, Any]) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise CoterieError("exporting to ONNX needs onnx and onnxscript: pip install 'coterie[onnx]'") from None
    # Otherwise it logs every operator that it would support if torchvision were installed.
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        program = _in_words(
            lambda: torch.onnx.export(
                module,
                (_example(about),),
                input_names=["x"],
                output_names=[about["output"]],
                dynamic_shapes=(_any_rows(),),
                dynamo=True,
                verbose=False,
            )
        )
    finally:
        logger.setLevel(before)
    proto = program.model_proto
    for key in ("client", "method", "classes", "output"):
        proto.metadata_props.add(key=key, value=json.dumps(about.get(key)))
    content: bytes = proto.SerializeToString()
    return content


def _example(about: dict[str, Any]) -> Tensor:
    return blank_inputs(about, 2)  # with one row, torch would take 1 for the only length


def _any_rows() -> dict[int, Any]:
    return {0: torch.export.Dim("rows")}


def _in_words(trace: Callable[[], Any]) -> Any:
    """Trace a model; raise `CoterieError` with a short reason if that fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return trace()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CoterieError(
            f"this model cannot be traced ({lines[0]}); --format safetensors exports its weights instead"
        ) from error


def _save(path: Path, content: bytes) -> None:
    path.write_bytes(content)
