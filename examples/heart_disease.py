"""Four hospitals' own files: UCI Heart Disease. Who gains from training together?

The files (`processed.cleveland.data` and three more) have no header and mark missing values by '?'. They are looked for
in the folder given, else in $COTERIE_DATA/heart-disease. From the command line, the same is

    coterie run --silos heart-disease/processed.*.data --columns age,sex,... --target 'num>0' --class-weights balanced
"""

import os
import sys
from pathlib import Path

import coterie

COLUMNS = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def folder(given: str | None = None) -> Path:
    return Path(given) if given else Path(os.environ.get("COTERIE_DATA", "data")) / "heart-disease"


def main(where: str | None = None, rounds: int = 20) -> coterie.Result:
    files = [str(folder(where) / f"processed.{name}.data") for name in HOSPITALS]
    result = coterie.run(
        "fedmap",
        silos=files,
        columns=COLUMNS,
        target="num>0",  # 0: no disease; 1 to 4: its degrees
        class_weights="balanced",  # Switzerland has 8 healthy patients in 123
        rounds=rounds,
        **{"engine": "stacked", "compile": False, "workers": 1},  # too little work for anything more
    )
    print("hospital               patients trained on   alone   together   gain (balanced accuracy, test)")
    for row in result.clients:
        alone, together = row["local_test_balanced_accuracy"], row["test_balanced_accuracy"]
        print(f"{row['client']:22} {row['train']:19}  {alone:6.3f}     {together:6.3f} {row['gain']:+6.3f}")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:2])
