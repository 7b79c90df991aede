question = 'How does the loss fall with weights and with tokens?'
# Trains three sizes for two to four lengths, and fits a law to the losses (arXiv:2001.08361). A batch has about as many
# tokens as the run has steps:
#   python bench.py config/lab_plan.py --dataset=my_text.txt
# Answer: for N matmul weights and D tokens, the loss is (4.97e12 / N^1.02 + 2.44e13 / D)^0.088 nats per token, off by
# 0.6%. These are losses of the ten runs (seed 1, 34 million tokens of books, one core of an AMD EPYC with AVX512_BF16):
#
#   layers x width    500 steps of 4    1,000 of 8    2,000 of 16    4,000 of 32
#   2 x 64            5.088             4.656         4.343          4.162
#   3 x 128           5.022             4.526         4.124          3.862
#   5 x 256           5.046             4.431
#
# `bench.py --what=plan` chooses sizes by a law of the same form, which fits these ten runs and 19 with other texts, off
# by 1.6%: loss = s (0.045 / N^0.85 + 1 / D)^0.115. The scale s depends on the text, and p > 1 passes over a text are
# worth sqrt(p). The other runs, without dropout, in bits per byte (seed 1, the same machine, compiled):
#
#   Python code, 1.95 million tokens: 2 x 96 2,733 steps of 16 1.524, 1,465 of 32 1.525 | 3 x 128 1,000 of 16 1.527,
#     2,733 of 8 1.495, 1,615 of 16 1.489, 868 of 32 1.478, 450 of 64 1.497 | 4 x 192 1,294 of 8 1.533, 810 of 16 1.491,
#     445 of 32 1.500, 954 of 32 1.388, 1,356 of 32 1.374 | 5 x 256 412 of 16 1.585, 1,281 of 16 1.370, 710 of 32 1.396;
#     later, on an Intel Xeon with AMX, not fitted: 4 x 192 1,432 of 32 1.367, 2,864 of 16 1.332 | 5 x 256 1,217 of 32
#     1.353, 2,434 of 16 1.322, 4,400 of 8 1.333 | 7 x 384 1,553 of 16 1.319
#   TinyStories, 3.5 MB, 0.87 million tokens of 2,048: 3 x 128 842 of 16 1.049, 1,043 of 32 1.011 | 4 x 192 1,420 of 8
#     1.036, 872 of 16 1.017, 487 of 32 1.025 | 5 x 256 451 of 16 1.084; later, not fitted: 3 x 128 1,264 of 16 1.008 |
#     4 x 192 2,170 of 8 1.003, 1,085 of 16 1.000, 542 of 32 1.014 | 5 x 256 848 of 16 0.993; on the Intel Xeon: 2 x 96
#     1,264 of 16 1.067 | 3 x 128 2,000 of 8 1.037, 1,130 of 16 1.021, 1,264 of 16 1.007, 612 of 32 1.031 | 4 x 192 640
#     of 16 1.057
#   Shakespeare, 1.1 MB, 0.41 million tokens of 1,024: 3 x 128 804 of 8 2.155 | 4 x 192 1,608 of 4 2.112, 804 of 8
#     2.104, 402 of 16 2.130, 201 of 32 2.186 | 5 x 256 670 of 8 2.124, 402 of 16 2.110
#
# The other rules are from runs of one seed, too:
# - Rates of 3e-3, 6e-3 and 12e-3 are in README.md.
# - If the text limits the run, a batch of 16 is better than one of 32: Python code, 4 x 192 and 5 x 256, by 0.010 to
#   0.035.
# - Passes without dropout: Python code, 3 x 128, 1.8 passes 1.478, 5.5 passes (2,616 steps of 32) 1.515; but
#   TinyStories, 3 x 128, 4.7 passes (1,917 of 16) 1.002.
# - Dropout of 0.2 doubles the time of a step on a CPU, and what it is worth depends on the text. In two minutes: 3 x
#   128 with TinyStories, 558 of 32, 1.121 (without it 1.011), and with Shakespeare, 1,098 of 16, 2.146; 2 x 96 with
#   Shakespeare, 1,173 of 32, 2.165. It pays with more time: Python code, 3 x 128, 4.2 passes 1.450; Shakespeare, 3 x
#   128, 12 passes 2.104, 4 x 192, 8 passes 2.105; TinyStories, 4 x 192, 7 passes 0.954, where 5 passes of 5 x 256
#   without it end at 1.099. Over ten such runs, these passes are worth 0.6 times those without it (0.38 to 1.2). A
#   batch should not grow with them: Shakespeare, 3 x 128, 1,140 of 32 2.125, 2,280 of 16 2.111, 4,560 of 8 2.105.
# - The default run: 1,000 of 16 1.528, 1.533, 1.508 (seeds 1, 2, 3); in the same time, 1,690 of 8 1.528, 1.520, 1.520,
#   or at 4.2e-3 1.527, 1.528; 1,850 of 8 with a vocabulary of 2,048 1.551, 1.559; later, 1,250 of 12 1.514, 1.512,
#   1.499 (1,290 1.515, 1.514, 1.499, or at 5e-3 1.511, 1.521), which it now is.
# - Vocabulary: 1 MB of Shakespeare with 4,096 tokens at best 2.154, with 1,024 2.104, with 512 2.136; 90 KB of it with
#   4,096 2.957, with 1,024 2.297, with 512 2.273 (all with dropout).
# Not checked: widths above 256, contexts other than 128, more than 17 million tokens, GPUs.
what = 'scaling'
out_dir = 'out/lab_plan'
picture = 'max_iters'
seeds = 1
eval_interval = 1_000_000   # only at the end
keep_checkpoints = 1
sample_tokens = 0
variants = ''
for _width, _lengths in {64: (500, 1000, 2000, 4000), 128: (500, 1000, 2000, 4000), 256: (500, 1000)}.items():
    for _steps in _lengths:
        variants += (f'{_width} wide, {_steps} steps: --n_layer={_width // 64 + 1} --n_embd={_width} '
                     f'--n_head={_width // 32} --batch_size={_steps // 125} --max_iters={_steps}\n')
