"""Four hospitals' own files: UCI Heart Disease. Which hospital gains from training together?

The files (`processed.cleveland.data` and three more) have no header and mark missing values by '?'. They are looked for
in the folder given, else in $COTERIE_DATA/heart-disease. From the command line, the same is

    coterie run --silos heart-disease/processed.*.data --columns age,sex,... --target 'num>0' --class-weights balanced
"""

import os
import sys
from pathlib import Path
from typing import Any

import coterie

COLUMNS = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
METHODS = ("fedmap", "fedavg-ft")


def folder(given: str | None = None) -> Path:
    return Path(given) if given else Path(os.environ.get("COTERIE_DATA", "data")) / "heart-disease"


def main(where: str | None = None, rounds: int = 20) -> dict[str, coterie.Result]:
    settings: dict[str, Any] = {
        "silos": [str(folder(where) / f"processed.{name}.data") for name in HOSPITALS],
        "columns": COLUMNS,
        "target": "num>0",  # 0: no disease; 1 to 4: its degrees
        "class_weights": "balanced",  # Switzerland has 8 healthy patients in 123
        "rounds": rounds,
        **{"engine": "stacked", "compile": False, "workers": 1},  # too little work for anything more
    }
    results = {}
    for method in METHODS:
        results[method] = coterie.run(method, **settings)
        metric = results[method].metric
        print(f"{method}, test {metric}\n{'':22} {'alone':>8} {'together':>8} {'gain':>8}")
        for row in results[method].clients:
            alone, together = row[f"local_test_{metric}"], row[f"test_{metric}"]
            print(f"{row['client']:22} {alone:8.3f} {together:8.3f} {row['gain']:+8.3f}")
    return results


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
