"""Which extra of fedgma brings a package, so that one that is missing is answered with the command that installs it."""

from fedgma.errors import ConfigError

EXTRAS = {  # name to import -> extra
    **dict.fromkeys(("torch", "pydantic", "typer", "click", "rich", "safetensors", "filelock"), "sim"),
    **dict.fromkeys(("scipy", "matplotlib", "PIL", "pooch"), "sim"),
    "numba": "fast",
    "pyarrow": "hub",
    "flwr": "flower",
    **{name: name for name in ("nvflare", "pfl", "peft", "ray")},
}


def not_installed(error: ImportError) -> ConfigError | None:
    """What to say of an import that failed; None if it is of no package that an extra brings.

    >>> print(not_installed(ModuleNotFoundError(name="scipy.special")))
    scipy is not installed: pip install 'fedgma[sim]'
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package) if isinstance(error, ModuleNotFoundError) else None
    return None if extra is None else ConfigError(f"{package} is not installed: pip install 'fedgma[{extra}]'")
