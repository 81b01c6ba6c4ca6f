"""The module that a site takes home: its federated model, its local one or their average, calibrated if asked for."""

from __future__ import annotations

from torch import Tensor, nn

from coterie.core.targets import Target
from coterie.evaluation.adoption import AVERAGE, LOCAL, average


class Average(nn.Module):
    """Average what two models predict, as probabilities or values; the outputs are those of one that predicts so."""

    def __init__(self, target: Target, federated: nn.Module, local: nn.Module) -> None:
        super().__init__()
        self.target, self.federated, self.local = target, federated, local

    def forward(self, x: Tensor) -> Tensor:
        return average(self.target, self.federated(x), self.local(x))


class Calibrated(nn.Module):
    """Divide a classifier's outputs by a temperature."""

    def __init__(self, classifier: nn.Module, temperature: float) -> None:
        super().__init__()
        self.classifier, self.temperature = classifier, temperature

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(x) / self.temperature
        return outputs


def kept_module(
    target: Target, federated: nn.Module, local: nn.Module | None, kept: str, temperature: float | None
) -> nn.Module:
    """Return the module that predicts as the model that is kept, in evaluation mode; `local` only if it is needed."""
    module = federated
    if kept == LOCAL and local is not None:
        module = local
    elif kept == AVERAGE and local is not None:
        module = Average(target, federated, local)
    return (module if temperature is None else Calibrated(module, temperature)).eval()
