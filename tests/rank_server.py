"""What the server of tests.ranks imports last. Its ranks share all that is there: they start and
end quickly."""

from __future__ import annotations

import gc

from raydist.node import huge_pages

gc.freeze()  # a rank that collects garbage would copy the pages of what it only looks at
for address in huge_pages.scattered_addresses():
    huge_pages.collapse(address)
