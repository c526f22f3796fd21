// What emulation.cpp tells AddressSanitizer, for programs that are built without it.
#include <sanitizer/common_interface_defs.h>

extern "C" {

void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
void __sanitizer_symbolize_pc(void*, const char*, char* text, size_t size) {
  if (size > 0) *text = '\0';
}

}  // extern "C"
