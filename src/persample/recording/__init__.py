"""Sees every torch call of the model, follows the samples, and taps every use of a parameter.

``recorder.py`` receives a call, ``dispatch.py`` decides what it is. ``use_capture.py`` runs the
calls in which a parameter interacts with samples, ``tapping.py`` taps their results,
``graph_calls.py`` answers calls about autograd's graph, ``result_states.py`` notes what is known of
the results.
"""
