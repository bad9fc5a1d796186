"""Who writes the next token: pure strategies over a decoding batch, their random draws, their token tables."""

from tandemrl.selection.authors import Replay as Replay
from tandemrl.selection.authors import replay as replay
from tandemrl.selection.authors import resumed as resumed
from tandemrl.selection.strategies import Strategy as Strategy
from tandemrl.selection.strategies import Who as Who
from tandemrl.selection.strategies import alternating as alternating
from tandemrl.selection.strategies import alternating_turns as alternating_turns
from tandemrl.selection.strategies import annealed as annealed
from tandemrl.selection.strategies import bernoulli as bernoulli
from tandemrl.selection.strategies import chunk as chunk
from tandemrl.selection.strategies import first_step as first_step
from tandemrl.selection.strategies import first_turn as first_turn
from tandemrl.selection.strategies import linear as linear
from tandemrl.selection.strategies import per_group as per_group
from tandemrl.selection.strategies import sentence as sentence
from tandemrl.selection.strategies import solo as solo
from tandemrl.selection.strategies import turn as turn
from tandemrl.selection.strategies import word as word
from tandemrl.selection.strategies import word_aligned as word_aligned
from tandemrl.selection.trial import try_strategy as try_strategy
from tandemrl.selection.whole_words import before_word as before_word
