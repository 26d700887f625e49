"""Results on their way to the broker.

message: what is said. inbox, outbox: what waits, in memory and on disk. mqtt, dialler: the wire. publisher: the policy.
"""
