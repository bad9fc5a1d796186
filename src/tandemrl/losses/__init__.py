"""What is optimised: pure functions of tensors and keyword hyperparameters.

They return one result per token; only ``reduce`` makes a scalar of them.
"""

from tandemrl.config.recipes import Recipe as Recipe
from tandemrl.config.recipes import Reduction as Reduction
from tandemrl.losses.advantages import explained_variance as explained_variance
from tandemrl.losses.advantages import gae as gae
from tandemrl.losses.advantages import group_centred as group_centred
from tandemrl.losses.advantages import group_normalised as group_normalised
from tandemrl.losses.advantages import leave_one_out as leave_one_out
from tandemrl.losses.advantages import whiten as whiten
from tandemrl.losses.advantages import zero_variance_groups as zero_variance_groups
from tandemrl.losses.penalties import adapt_kl_coef as adapt_kl_coef
from tandemrl.losses.penalties import kl as kl
from tandemrl.losses.penalties import kl_penalty as kl_penalty
from tandemrl.losses.penalties import overlong_penalty as overlong_penalty
from tandemrl.losses.penalties import token_rewards as token_rewards
from tandemrl.losses.policy import Coefficients as Coefficients
from tandemrl.losses.policy import average_metrics as average_metrics
from tandemrl.losses.policy import idle as idle
from tandemrl.losses.policy import policy_loss as policy_loss
from tandemrl.losses.policy import reduce as reduce
from tandemrl.losses.policy import totals as totals
from tandemrl.losses.recipes import RECIPES as RECIPES
from tandemrl.losses.recipes import compute_advantages as compute_advantages
from tandemrl.losses.recipes import try_recipe as try_recipe
from tandemrl.losses.surrogates import cispo as cispo
from tandemrl.losses.surrogates import importance_weights as importance_weights
from tandemrl.losses.surrogates import log_ratio as log_ratio
from tandemrl.losses.surrogates import ppo_clip as ppo_clip
from tandemrl.losses.surrogates import reinforce as reinforce
from tandemrl.losses.surrogates import sequence_old_logprobs as sequence_old_logprobs
from tandemrl.losses.surrogates import sequence_sum as sequence_sum
from tandemrl.losses.surrogates import value_loss as value_loss
from tandemrl.losses.weights import sequence_weights as sequence_weights
from tandemrl.losses.weights import token_weights as token_weights
from tandemrl.losses.weights import with_word_ends as with_word_ends
