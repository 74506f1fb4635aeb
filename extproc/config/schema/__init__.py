"""The schema of ``extproc.yaml``: one model a section, one file a subject.

docs/configuration.md is rendered from it.

Add a section: a model (a ``Section``) in a file here, one field in ``Settings``, then
``python -m extproc.config.reference``. The docstring below a field is its text in the reference.
"""

from extproc.config.schema.settings import Settings

__all__ = ["Settings"]
