"""FedeRiCo's Figure 1: each client has a few noisy points of one piece of a sine curve and fits a straight line.

No single line fits everybody. FedeRiCo's clients find out whose lines suit them: those of the neighbouring pieces. (On
average over draws of the data they then predict as well as alone; the point is whom they choose.)
`python examples/sine_curve.py sine.html` also draws the lines and the weights.
"""

import sys
from typing import Any

import numpy as np
import torch

import coterie
from coterie.data.readers.embedded import SINE_CLIENTS as CLIENTS
from coterie.data.readers.embedded import SINE_NOISE as NOISE
from coterie.data.readers.embedded import SINE_POINTS as POINTS
from coterie.data.readers.embedded import sine_pieces as pieces

TRAIN = 7  # of a client's 24 points


def draw(path: str, results: dict[str, coterie.Result], weights: np.ndarray) -> None:
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("data and lines", "row i: whose lines client i uses"))
    for i, (x, y) in enumerate(pieces()):
        figure.add_scatter(x=x[:, 0].numpy(), y=y.numpy(), mode="markers", name=f"client {i + 1}", row=1, col=1)
        ends = torch.stack([x.min(), x.max()])[:, None]
        for (name, result), dash in zip(results.items(), ("solid", "dot"), strict=True):
            line = result.model(i)(ends).detach()[:, 0].numpy()
            figure.add_scatter(x=ends[:, 0].numpy(), y=line, mode="lines", line_dash=dash, name=name, row=1, col=1)
    figure.add_heatmap(z=weights, colorscale="Blues", row=1, col=2)
    figure.update_layout(showlegend=False).write_html(path)


def main(path: str | None = None) -> tuple[np.ndarray, dict[str, coterie.Result]]:
    settings: dict[str, Any] = {"model": "linear", "rounds": 8, "local_epochs": 40, "batch_size": POINTS, "test": 0.5}
    settings |= {"optimizer": "sgd", "lr": 0.3, "momentum": 0.9, "engine": "stacked", "compile": False, "workers": 1}
    settings |= {"validation": 0.2}
    likelihood = TRAIN / (2 * NOISE**2)  # what a mean squared error counts in the true one
    own: dict[str, Any] = {"mode": "all-to-all", "local_work": "epochs", "temperature": likelihood}
    federico = coterie.run("federico", pieces(), **own, **settings)
    results = {"federico": federico, "fedavg": coterie.run("fedavg", pieces(), reference=False, **settings)}
    weights = np.array(federico.rounds[-1]["server"]["collaboration"])
    near = np.abs(np.subtract.outer(np.arange(CLIENTS), np.arange(CLIENTS))) <= 1
    told = {"alone": federico.reference, **results}
    print("test RMSE:", ", ".join(f"{name} {result.mean():.3f}" for name, result in told.items() if result))
    print(f"weight on oneself and the pieces beside: {(weights * near).sum(1).mean():.2f}, by chance {near.mean():.2f}")
    if path:
        draw(path, results, weights)
    return weights, results


if __name__ == "__main__":
    main(*sys.argv[1:2])
