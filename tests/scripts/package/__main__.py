"""`python -m package`: relative imports, its own spec."""

import json
import os
import sys

from . import words
from .words import WORD

facts = {
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": __spec__.name,
    "argv": sys.argv,
    "path0": sys.path[0],
    "words": [words.__name__, WORD],
    "main": sys.modules["__main__"].__dict__ is globals(),
}
with open(os.environ["FACTS"] + os.environ.get("RANK", ""), "w") as out:
    json.dump(facts, out)
