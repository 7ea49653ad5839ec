"""What may be wrong with a connection, and with what came over it; both become errors that name the peer."""


class Broken(Exception):
    """The connection is no more, or nobody knows where its next message begins. Another one may take its place."""


class Malformed(Exception):
    """What came is nothing that a peer of this release sends."""
