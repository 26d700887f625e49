"""Results, events, telemetry and status on their way to the broker.

message, telemetry: what is said. inbox, outbox: what waits, in memory and on disk. presence, losses: what is told of
the publishing itself. mqtt, dialler: the wire. courier: the policy of the thread that publishes. publisher: the face to
all others.
"""
