#!/usr/bin/env bash
# Every kernel at small shapes under NVIDIA's compute-sanitizer, on a GPU: bash tests/sanitize.sh memcheck
# (or racecheck, synccheck, initcheck; a second argument: how many run side by side). Needs an installed environment,
# and compute-sanitizer, which comes with the CUDA toolkit. racecheck reports the hand-over of Triton's own warp_specialize
# in the Hopper kernel (eval/results/sparse-log.md): counted, and no failure; any other report is one.
set -euo pipefail
tool=${1:?memcheck, racecheck, synccheck or initcheck}
jobs=${2:-4}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
tests=(
  "test_append.py::test_stores_what_the_quantizer_makes[triton-130-starts7-80-dtype7]"
  "test_append.py::test_whole_blocks_go_to_the_pages_that_the_table_names[triton-pairs]"
  "test_append.py::test_a_step_seals_what_is_full_and_then_appends[triton-mixed-80]"
  "test_append.py::test_keys_are_balanced_on_the_way[triton-80-dtype3]"
  "test_append.py::test_nan_and_inf_are_reported[triton-70-40-1-nan]"
  "test_quantize.py::test_kernel_gives_the_references_tokens[d80-float32]"
  "test_quantize.py::test_kernel_gives_the_references_pages[80-32-3]"
  "test_quantize.py::test_kernel_gives_the_references_pages[128-128-2]"
  "test_quantize.py::test_dequantize_ragged_rows[3bit]"
  "test_operands.py::test_kernel_gives_the_references_codes[turbo]"
  "test_operands.py::test_kernel_gives_the_references_codes[fp8]"
  "test_decode.py::test_cases[triton-8+4+3+2-native]"
  "test_decode.py::test_cases[triton-16-new-native]"
  "test_decode.py::test_options[triton-all-turbo]"
  "test_decode.py::test_options[triton-all-native]"
  "test_full.py::test_decode_is_plain_attention[triton-options1-dtype1-turbo]"
  "test_full.py::test_a_prompt_over_a_past[triton]"
  "test_sparse.py::test_many_keys_take_several_tiles_of_keys_and_of_centroids[triton-128]"
  "test_sparse.py::test_a_key_goes_to_its_nearest_centroid[triton-size2-128-assign_new]"
  "test_sparse.py::test_rotary_embedding_is_undone_on_the_way[triton-2-size1-assign_new]"
  "test_sparse.py::test_classify_is_two_layers[triton-3-80-64-33-3-2]"
  "test_sparse_attention.py::test_mixed_widths_and_blocks[triton-128]"
  "test_sparse.py::test_visits_are_the_best_buckets[triton-1-256]"
  "test_sparse_attention.py::test_many_shares[16-2-1]"
  "test_prefill_kernel.py::test_head_groups[gqa7:1-turbo]"
  "test_prefill_kernel.py::test_head_groups[gqa7:1-int8]"
  "test_prefill_kernel.py::test_head_groups[gqa7:1-fp8]"
  "test_prefill_kernel.py::test_head_groups[gqa7:1-native]"
  "test_prefill_kernel.py::test_over_a_ragged_past[turbo-all]"
  "test_prefill_kernel.py::test_over_a_ragged_past[native-all]"
  "test_prefill_kernel.py::test_a_past_of_any_bits_and_blocks[b128-2bit]"
  "test_prefill_kernel.py::test_nan_and_inf_reach_the_rows_that_see_them[q-nan-turbo]"
  "test_prefill_kernel.py::test_prompts_in_16_bit[f16-d64-turbo]"
  "test_prefill_kernel.py::test_prompts_in_16_bit[bf16-d128-fp8]"
)
run=(python3 -m pytest -m gpu -q --tb=short -p no:warnings -p no:cacheprovider)
tests=("${tests[@]/#/tests/}")
logs=$(mktemp -d)
status=0
places=$(grep -nE "def hopper_prefill_kernel|gl\.warp_specialize" turbo_hf/ops/prefill/kernel_hopper.py | cut -d: -f1 | paste -sd"|")
hand_over="hopper_prefill_kernel\+0x[0-9a-f]+ in kernel_hopper\.py:($places)( |$)"
only_hand_over() {
  grep -qE "Race reported" "$1" && ! grep -E " (Read|Write) access at | (Invalid|Error:)| failed" "$1" | grep -qvE "$hand_over"
}
side_by_side() {
  local processes=() part job at code
  for ((job = 0; job < jobs; job++)); do
    part=()
    for ((at = job; at < ${#tests[@]}; at += jobs)); do part+=("${tests[at]}"); done
    "$@" "${run[@]}" "${part[@]}" > "$logs/$job.log" 2>&1 &
    processes+=($!)
  done
  for ((job = 0; job < jobs; job++)); do
    code=0
    wait "${processes[job]}" || code=$?
    if ((code)) && only_hand_over "$logs/$job.log"; then
      grep -hE " passed" "$logs/$job.log"
      echo "$(grep -cE "Race reported" "$logs/$job.log") reports of warp_specialize's hand-over, none else"
      continue
    fi
    ((code)) && status=$code
    grep -hE "SUMMARY|passed|failed|=========.*(Invalid|hazard|Error)" "$logs/$job.log" || tail -20 "$logs/$job.log"
  done
}
echo "== compiling the kernels, $jobs side by side"
side_by_side env
echo "== $tool"
# memory that torch keeps would hide what lies beyond a tensor's end
side_by_side env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 9
exit "$status"
