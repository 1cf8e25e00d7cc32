"""Forms for gradients of special structure, and caches that several questions share.

They are here for speed. The general forms, and what every form must answer, are one level up.
"""
