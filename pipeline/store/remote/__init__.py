"""A second tier of the store, in a bucket or in a folder that machines share (file://), that several sites share.

    tier = RemoteTier("s3://bucket/quantmint", Objects("s3://bucket/quantmint"), print, device_here)
    tier.bring(work, inputs, progress)      # the entry that another site made, or None
    tier.send(entry, inputs, progress)      # for the other sites

It holds what was measured, not weights: those are made again from the source faster than they travel, to the same
bytes, and what is measured of other bytes is not taken.
"""

from typing import Final

VARIABLE: Final = "QUANTMINT_REMOTE_STORE"
"""Variable that names the tier, for commands that others start."""
