"""Flower's answer to the submission of an app: whether the app's settings are the reason why there is no run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgma.errors import ConfigError
from fedgma.flower.deployment import Deployment

LONGEST = 400  # characters of an answer that are shown
REFUSED = "[code: 15]"  # of the SuperLink, which does not tell its command line why
INVALID = (  # how the answers of Flower's command line begin that would be the same at every start
    "Failed to load Flower App configuration",
    "Invalid Flower App configuration",
    "The Flower App ",
    "The provided configuration string is in an invalid format",
    "The value for key ",
    "FAB size exceeds",
    "fab-format-version",
)


def why_not(answer: Mapping[str, Any], deployment: Deployment) -> str:
    """Why an app was not submitted; raises `ConfigError` if its settings are the reason, which no restart mends."""
    lines = str(answer.get("error-message", "")).strip().splitlines() or ["no answer"]
    if lines[-1].startswith(REFUSED):
        raise ConfigError(f"Flower refuses the app's settings: {_refused_setting(deployment) or lines[-1]}")
    begins = [number for number, line in enumerate(lines) if line.startswith(INVALID)]
    if begins:
        said = " ".join(" ".join(lines[begins[0] :]).split())[:LONGEST].rstrip(".")
        where = f"--run-config, or {deployment.app / 'pyproject.toml'}"
        raise ConfigError(f"Flower refuses the app's settings: {said}; correct {where}")
    return lines[-1]


def _refused_setting(deployment: Deployment) -> str:
    """What the SuperLink says against the app's settings; Flower's command line does not tell."""
    lines = (deployment.state / "logs" / "superlink.log").read_text(errors="replace").splitlines()
    reasons = [found[1] for line in lines if (found := re.search(r"Could not start run: (.{1,200})", line))]
    return f"{reasons[-1].strip()}{deployment.hint(reasons[-1])}" if reasons else ""


def saved_nothing(folder: Path) -> ConfigError:
    """The error about an app that ended well without a run's folder: trained again, it would do the same."""
    return ConfigError(
        f"the app ended without an error but saved nothing in {folder}; "
        'pass folder=context.run_config["state"] to Masked(...).start'
    )
