"""Python imports this at its start when the folder is on its path: mutates Inductor's sources in this process."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from template_mutants import patches

patches.install()
