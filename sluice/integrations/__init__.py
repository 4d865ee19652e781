"""Private training inside other libraries' trainers, one module for each; see docs/integrations.md.

Nothing here is loaded by ``import sluice``: a module needs the library that it is named after.
"""

from sluice.integrations.privacy import Privacy

__all__ = ["Privacy"]
