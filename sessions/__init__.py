"""Conversations held on engines: who holds them, what they used, and the API and playground they come through.

Words: a ChatSession is a conversation, a Turn one request of it, an ApiKey what lets a program in. Messages themselves are
not kept. Django owns the app label "sessions", so this app's label is `hydra_sessions`.
"""
