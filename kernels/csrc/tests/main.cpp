// The kernels of every instruction set that this processor has, without Python: `make sanitize` builds them with
// AddressSanitizer and UndefinedBehaviorSanitizer.
#include <cstdio>
#include <vector>

#include "../kernels.h"

namespace quantsink {

int test_attention(const std::vector<const char*>& sets);
int test_coded(const std::vector<const char*>& sets);
int test_linear(const std::vector<const char*>& sets);

}  // namespace quantsink

int main() {
    std::vector<const char*> sets;
    for (const char* name : {"avx512bf16", "avx512", "avx2", "portable"}) {
        if (quantsink::select_kernels(name)) sets.push_back(name);
    }
    for (const char* name : sets) std::printf("%s ", name);
    std::printf("\nattention: %d cases\n", quantsink::test_attention(sets));
    std::printf("coded attention: %d cases\n", quantsink::test_coded(sets));
    std::printf("linear: %d cases\n", quantsink::test_linear(sets));
    return 0;
}
