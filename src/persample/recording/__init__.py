"""Sees every torch call of the model, follows the samples, and taps every use of a parameter.

``recorder.py`` receives a call, ``dispatch.py`` decides what it is, ``use_capture.py`` runs the
calls in which a parameter interacts with samples, ``result_states.py`` notes what is known of the
results.
"""
