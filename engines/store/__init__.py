"""The store: a host's KV memory outside its GPUs, one process that engines of this host and stores of others talk to.

An *object* is bytes named by their BLAKE3 digest, immutable (a block, tail, checkpoint, draft state, or a cut of a foreign
blob); a *slab* is a pre-faulted file on tmpfs that holds many; a *record* is an object's header there, and the index after a
restart; a *logical key* says what an object is before it exists; a *manifest* names the objects of one snapshot in order; a
*reservation* is room that somebody writes to; a *lease* keeps what somebody reads in its place.
Knows nothing of models, tokens, Django or conversations.
"""
