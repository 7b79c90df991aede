question = 'How does the loss fall with weights and with tokens?'
# Trains three sizes for two to four lengths, and fits a law to the losses (arXiv:2001.08361). A batch has about as many
# tokens as the run has steps. `bench.py --what=plan` chooses sizes by this law:
#   python bench.py config/lab_plan.py --dataset=my_text.txt
# Answer: for N matmul weights and D tokens, the loss is (4.97e12 / N^1.02 + 2.44e13 / D)^0.088 nats per token, off by
# 0.6%. These are losses of the ten runs (seed 1, 34 million tokens of books, one core of an AMD EPYC with AVX512_BF16):
#
#   layers x width    500 steps of 4    1,000 of 8    2,000 of 16    4,000 of 32
#   2 x 64            5.088             4.656         4.343          4.162
#   3 x 128           5.022             4.526         4.124          3.862
#   5 x 256           5.046             4.431
#
# The other rules of the plan are from these runs of one seed, not from laws (bits per byte):
# - Batch: of 2 million tokens of Python code, batches of 4 (rate 3e-3), 8 (4.2e-3) and 16 (6e-3) end at 1.524, 1.522
#   and 1.527; of 4 million of books, batches of 64 end 0.05 nats higher than of 16. Rates within a factor of 2 differ
#   by 0.011 at most for widths of 64 to 256.
# - Dropout of 0.2 (3 x 128, Python code, 2.0 million tokens): 2.1 passes 1.506 with and 1.491 without it, 4.2 passes
#   1.450 and 1.513.
# - Passes with dropout (1 MB of Shakespeare, 0.41 million tokens): 3 x 128 2.158 after 5 and 2.104 after 12, 5 x 256
#   2.112 after 6 and 2.194 after 12. Without it (0.31 million tokens): 3 x 128 2.210 after 3.3 and 2.596 after 6.7,
#   5 x 256 2.185 after 1.7 and 2.278 after 3.3.
# - Vocabulary: 1 MB of Shakespeare with 4,096 tokens at best 2.154, with 1,024 2.104, with 512 2.136; 90 KB of it with
#   4,096 2.957, with 1,024 2.297, with 512 2.273.
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
