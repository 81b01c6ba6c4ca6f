"""The module that a site takes home: its federated model, its local one or their average, calibrated if asked for."""

from __future__ import annotations

from torch import Tensor, nn

from coterie.evaluation.adoption import AVERAGE, LOCAL, average


class Average(nn.Module):
    """Average the probabilities of two classifiers (its outputs are their logarithms), or two regressions' outputs."""

    def __init__(self, federated: nn.Module, local: nn.Module, *, regression: bool) -> None:
        super().__init__()
        self.federated, self.local, self.regression = federated, local, regression

    def forward(self, x: Tensor) -> Tensor:
        return average(self.federated(x), self.local(x), regression=self.regression)


class Calibrated(nn.Module):
    """Divide a classifier's outputs by a temperature."""

    def __init__(self, classifier: nn.Module, temperature: float) -> None:
        super().__init__()
        self.classifier, self.temperature = classifier, temperature

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(x) / self.temperature
        return outputs


def kept_module(
    federated: nn.Module, local: nn.Module | None, kept: str, temperature: float | None, *, regression: bool
) -> nn.Module:
    """Return the module that predicts as the model that is kept, in evaluation mode; `local` only if it is needed."""
    module = federated
    if kept == LOCAL and local is not None:
        module = local
    elif kept == AVERAGE and local is not None:
        module = Average(federated, local, regression=regression)
    return (module if temperature is None else Calibrated(module, temperature)).eval()
